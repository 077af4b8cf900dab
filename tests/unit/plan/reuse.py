# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse on one instance with an unbounded store, from its definition alone.

Knows no coordinator, no mask and no search: sets of blocks, and every position tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.unit.plan.reference.models import ModelLayout
from tests.unit.plan.reference.trace import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True)
class _Group:
    """``window`` is None for full attention."""

    index: int
    block: int
    window: int | None
    drops: bool

    def needs(self, position: int) -> set[int]:
        """Ends of the blocks that the tokens at and behind a position attend to."""
        first = 0 if self.window is None else max(position - self.window + 1, 0)
        first = first // self.block * self.block
        return set(range(first + self.block, position + 1, self.block))

    def proof(self, position: int) -> set[int]:
        """A drafter's group has to own the block above as well."""
        return {position + self.block} if self.drops else set()


@dataclass
class Reuse:
    """Serves requests one by one.

    Attributes:
        layout: The groups.
        interval: Tokens between fixed tails; 0 for none.
        junctions: Whether tails are kept where prompts part.
        stored: What is stored: group, end of the block in its prompt, and id of the
            trace block, which names all that is before it.
    """

    layout: ModelLayout
    interval: int = 0
    junctions: bool = False
    stored: set[tuple[int, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        specs = [next(iter(layers.values())) for layers in self.layout.layers_by_group]
        drafters = [specs[index] for index in self.layout.eagle_group_ids]
        self._groups = [
            _Group(
                index,
                spec.block_size,
                getattr(spec, "sliding_window", None),
                # Groups with equal specs are searched together.
                spec in drafters,
            )
            for index, spec in enumerate(specs)
        ]
        self._block = self.layout.scheduler_block_tokens

    def serve(self, request: TraceRequest) -> int:
        """Return the tokens that a request need not compute; store what it leaves."""
        length = request.input_length
        whole = length // self._block * self._block
        positions = range(self._block, length, self._block)
        usable = []
        for group in self._groups:
            have = {
                end
                for end in range(group.block, whole + 1, group.block)
                if self._name(request, group, end) in self.stored
            }
            usable.append(
                {p for p in positions if group.needs(p) | group.proof(p) <= have}
            )
        hit = max(set.intersection(*usable), default=0)
        longest = max(set.union(*usable), default=0)
        tails = set(self._tails(length, hit, longest))
        for group in self._groups:
            kept = {end for p in tails for end in group.needs(p) | group.proof(p)}
            computed = set(range(hit + 1, whole + 1))
            if group.window is None:
                kept, computed = group.needs(whole), set(range(whole + 1))
            self.stored |= {
                self._name(request, group, end)
                for end in kept & (computed | group.needs(hit))
            }
        return hit

    def _name(
        self, request: TraceRequest, group: _Group, end: int
    ) -> tuple[int, int, int]:
        return group.index, end, request.hash_ids[(end - 1) // TRACE_BLOCK_TOKENS]

    def _tails(self, length: int, hit: int, longest: int) -> Iterator[int]:
        block = self._block
        back = block if self.layout.eagle_group_ids else 0
        # Where the same prompt could resume; with a drafter, a longer one too.
        if self.interval != block:
            yield max((length - 1) // block * block - back, 0)
        if self.interval != block and back:
            yield max(length // block * block - back, 0)
        if self.interval:
            # The first one past the end as well, with what of it there is.
            yield from range(self.interval, length + self.interval, self.interval)
        if self.junctions and longest > hit:
            yield longest
            if longest - back > hit:
                yield longest - back

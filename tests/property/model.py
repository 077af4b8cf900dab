# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse by brute force, from its definition alone.

A position is usable by a group if the group has what it needs there: full attention
all blocks below, a sliding window the blocks that reach into the window, Mamba the
state. Under EAGLE a group must also own the unit above. Written from the rules, and
without a look at the code under test: no clever search, no masks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from testbed.box import BoxEngine, Group, Layout
from testbed.box.memory_store import MemoryStore

# Says whether the block of a group that ends at a token position is cached.
Cached = Callable[[int, int], bool]


@dataclass(frozen=True)
class Reuse:
    """Where one request can resume. Lengths in tokens.

    Attributes:
        joint: What every group can reuse.
        longest: What some full-attention group can; without any, some group.
    """

    joint: int
    longest: int


class ReuseModel:
    """The rules for one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.block_tokens = layout.scheduler_block_tokens
        self.partial_hits = _partial_hits(layout)
        self.unit_tokens = (
            layout.hash_tokens if self.partial_hits else self.block_tokens
        )
        self.dropping = _dropping_groups(layout)

    @property
    def has_chunk_stops(self) -> bool:
        """Whether chunks have to end where something is kept."""
        return self._layout.has_mamba

    def proof_tokens(self, group_id: int) -> int:
        """Tokens above a position that a group must own too; 0 without a drop."""
        group = self._layout.groups[group_id]
        if group_id not in self.dropping or group.kind == "mamba":
            return 0
        return self._layout.hash_tokens if self.partial_hits else group.block_tokens

    @property
    def proof_block_tokens(self) -> int:
        """Tokens past a block boundary that a sibling must share to land on it.

        The whole proof block: only its end has a key, even where a part of it would
        do for a proof.
        """
        return max(
            self._layout.groups[group_id].block_tokens
            if self.proof_tokens(group_id)
            else 0
            for group_id in range(len(self._layout.groups))
        )

    def provable_in_store(self, num_tokens: int) -> int:
        """Return the highest boundary that a lookup of a prompt can prove."""
        asked = num_tokens // self.unit_tokens * self.unit_tokens
        return (
            max(asked - self.proof_block_tokens, 0)
            // self.block_tokens
            * (self.block_tokens)
        )

    def proofs_lost(
        self, position: int, chunk_ends: list[int]
    ) -> list[tuple[int, int]]:
        """Return ``(group id, block end)`` of proof blocks that are gone when due.

        vLLM saves whole scheduler blocks. A window that is shorter than one can move
        on between the chunk that computes a proof block and the chunk that completes
        its scheduler block; then there is nothing left to save, in stock as well.
        """
        floor = position // self.block_tokens * self.block_tokens
        due = floor + self.block_tokens
        start = max((end for end in chunk_ends if end < due), default=0)
        return [
            (group_id, end)
            for group_id, end in self._proofs(floor)
            if start - self._layout.groups[group_id].window_tokens + 1 >= end
        ]

    def proofs_of_nothing(self) -> list[tuple[int, int]]:
        """Return the proof blocks of the empty prefix: stored, and of no use.

        A request of one scheduler block and a bit stores them as the lower of its
        replay tails, unless it hit something: then it does not compute them.
        """
        return list(self._proofs(0))

    def _proofs(self, floor: int) -> Iterable[tuple[int, int]]:
        return (
            (group_id, floor + group.block_tokens)
            for group_id, group in enumerate(self._layout.groups)
            if group.window_tokens and self.proof_tokens(group_id)
        )

    def proofs_last(self, position: int, chunk_ends: list[int]) -> bool:
        """Whether every proof block at a position is still there when it is saved."""
        return not self.proofs_lost(position, chunk_ends)

    def found_by_vllm(self, position: int) -> bool:
        """Whether vLLM's search finds a position that is usable.

        Where a window reaches back to the first token, it aligns what it found before
        it drops the proof block, and loses a scheduler block more than it has to.
        """
        return not any(
            self.proof_tokens(group_id)
            and -(-(group.window_tokens - 1) // group.block_tokens) * group.block_tokens
            > position
            for group_id, group in enumerate(self._layout.groups)
            if group.window_tokens
        )

    def needs(self, group_id: int, position: int) -> list[int]:
        """Return the ends of the blocks that a group needs at a position.

        At 64 with blocks of 16, full attention needs those that end at 16, 32, 48
        and 64; a window of 32 those at 48 and 64.
        """
        group = self._layout.groups[group_id]
        proof = self.proof_tokens(group_id)
        above = [position + proof] if proof else []
        if group.kind == "mamba":
            return [position]
        first = 0
        if group.window_tokens:
            # The token at ``position`` attends to this one and those behind it.
            oldest = max(position - group.window_tokens + 1, 0)
            first = oldest // group.block_tokens * group.block_tokens
        ends = list(range(first + group.block_tokens, position, group.block_tokens))
        if first < position:
            ends.append(position)
        return ends + above

    def usable(self, group_id: int, position: int, cached: Cached) -> bool:
        return all(
            any(cached(group_id, other) for other in self._covering(group_id, end))
            for end in self.needs(group_id, position)
        )

    def _covering(self, group_id: int, end: int) -> Iterable[int]:
        """Return the ends of blocks that hold all tokens of one that ends at ``end``.

        A full-attention block that ends inside its block is as good as a part of a
        longer one; a state is what it is.
        """
        group = self._layout.groups[group_id]
        if group.kind == "mamba" or not self.partial_hits:
            return (end,)
        block_end = -(-end // group.block_tokens) * group.block_tokens
        return range(end, block_end + 1, self._layout.hash_tokens)

    def reuse(self, num_tokens: int, cached: Cached) -> Reuse:
        """Return where a request of ``num_tokens`` tokens can resume.

        Args:
            num_tokens: Tokens of the request.
            cached: What is cached of its prefix.
        """
        # The last token is always computed.
        top = (num_tokens - 1) // self.unit_tokens * self.unit_tokens
        positions = range(top, 0, -self.unit_tokens)
        groups = range(len(self._layout.groups))
        full = [i for i in groups if self._layout.groups[i].kind in ("full", "mla")]
        joint = longest = 0
        for position in positions:
            usable = [self.usable(group_id, position, cached) for group_id in groups]
            if any(usable[group_id] for group_id in full or groups):
                longest = max(longest, position)
            if all(usable):
                joint = position
                break
        return Reuse(joint, longest)

    def junctions(self, reuse: Reuse) -> set[int]:
        """Return the positions that a request with this reuse should keep."""
        if reuse.longest <= reuse.joint:
            return set()
        lower = reuse.longest - self.block_tokens if self.dropping else reuse.longest
        return {p for p in (reuse.longest, lower) if p > reuse.joint}

    def kept(
        self,
        locally: Reuse,
        in_store: Reuse,
        declared: Iterable[int] = (),
        predicted: Iterable[int] = (),
    ) -> set[int]:
        """Return the junctions at which a request leaves what later siblings need.

        A recurrent state exists only where a prefill chunk ends, and chunks end at two
        junctions at most: at the longest local one, where stock ends them too, and at
        the longest above it; without a local one, at the last two of the store. What
        is left of the two is for the last that the client declared, and then for the
        last that were predicted.
        """
        local, store = self.junctions(locally), self.junctions(in_store)
        if not self._layout.has_mamba:
            return local | store | {*declared, *predicted}
        if local:
            kept = {max(local), *sorted(p for p in store if p > max(local))[-1:]}
        else:
            kept = set(sorted(store)[-2:])
        for positions in (declared, predicted):
            room = 2 - len(kept)
            kept.update(sorted(set(positions) - kept)[-room:] if room else ())
        return kept

    def declared(self, asked: Any, num_tokens: int, hit_tokens: int) -> set[int]:
        """Return what a request keeps of what its client declared.

        The highest scheduler block at or below each position at which one who shares
        up to there can land, and that is stored whole with what proves it. Chunks of
        recurrent models can move it; see ``rules/boundaries.py``.
        """
        if not isinstance(asked, list):
            return set()
        proof = self.proof_block_tokens
        kept, last = set(), 0
        for position in asked[:4]:
            is_good = type(position) is int and last < position <= num_tokens
            if not is_good:
                continue
            last = position
            usable = [
                start
                for start in range(0, position + 1, self.block_tokens)
                if start + proof <= position
                and start + (self.block_tokens if proof else 0) <= num_tokens
            ]
            kept.add(max(usable, default=0))
        return {position for position in kept if position > hit_tokens}

    def tails(self, position: int) -> Iterable[tuple[int, int]]:
        """Yield ``(group id, block end)`` of what sparse groups keep at a position."""
        floor = position // self.block_tokens * self.block_tokens
        for group_id, group in enumerate(self._layout.groups):
            if floor and group.window_tokens:
                yield from ((group_id, end) for end in self.needs(group_id, floor))
            elif group.kind == "mamba":
                yield from ((group_id, end) for end in {position, floor} if end)


def _dropping_groups(layout: Layout) -> set[int]:
    """Groups that drop a matched block: flagged ones, and those of the same spec."""
    if not layout.drops_eagle_block:
        return set()
    flagged = [group for group in layout.groups if group.eagle]

    def drops(group: Group) -> bool:
        return not flagged or any(_same_spec(group, other) for other in flagged)

    return {index for index, group in enumerate(layout.groups) if drops(group)}


def _same_spec(group: Group, other: Group) -> bool:
    return (group.kind, group.block_tokens, group.window_tokens) == (
        other.kind,
        other.block_tokens,
        other.window_tokens,
    )


def _partial_hits(layout: Layout) -> bool:
    mamba = [group for group in layout.groups if group.kind == "mamba"]
    return any(group.block_tokens > layout.hash_tokens for group in mamba) and not any(
        group.window_tokens and group.block_tokens != layout.hash_tokens
        for group in layout.groups
    )


def in_store(
    store: MemoryStore, block_hashes: list[bytes], hash_tokens: int, asked_tokens: int
) -> Cached:
    """Return what the store holds of a request's prefix, as far as it is asked."""
    names = {
        (int(key.rpartition("@group:")[2].partition("@")[0]), key.rpartition("@")[2])
        for key in store.values
    }
    hashes = [bytes(block_hash).hex() for block_hash in block_hashes]

    def cached(group_id: int, end: int) -> bool:
        unit = end // hash_tokens - 1
        return end <= asked_tokens and (group_id, hashes[unit]) in names

    return cached


def in_local_cache(engine: BoxEngine, block_hashes: list, hash_tokens: int) -> Cached:
    """Return what an instance's own cache holds of a request's prefix."""
    pool = engine.scheduler.kv_cache_manager.block_pool

    def cached(group_id: int, end: int) -> bool:
        unit = end // hash_tokens - 1
        return unit < len(block_hashes) and bool(
            pool.get_cached_block(block_hashes[unit], [group_id])
        )

    return cached

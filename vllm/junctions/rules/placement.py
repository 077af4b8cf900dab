# SPDX-License-Identifier: Apache-2.0
"""Predicted tails: where a prompt's first sibling will part, learned from lookups.

A junction is found by the first sibling, which pays the whole prefill. But siblings
part at much the same distance from the end of the prompt that they share with: a
question behind a document, a turn behind a history. So an extra tail at that distance
serves the first sibling as well. Nothing in this module knows about vLLM's objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.junctions.rules.best_tails import best_tails
from vllm.junctions.rules.boundaries import at_chunk_end
from vllm.junctions.rules.siblings import (
    FADE,
    Owner,
    PartingRates,
    PrefixKey,
    PrefixOwners,
    UnusedTails,
)

MAX_TAILS = 4

# The hit rate at which dense retention would be worth its bytes: a predicted tail has
# to bring as many tokens as that, per byte, or it is not placed.
_BREAK_EVEN_HIT_RATE = 0.4
# First siblings that may be due, and none come, before nothing is placed any more.
_MAX_DUE = 8
# By what share one first sibling changes the share of those who find their tail.
_FOUND_STEP = 1 / 16


@dataclass(frozen=True, slots=True)
class FinishedLookup:
    """A request, and what a lookup said about it.

    Attributes:
        num_tokens: Its length.
        hit_tokens: What all KV-cache groups can reuse, in the store or locally.
        junctions: Positions above that which ``junction_boundaries`` gave.
        prefix_key: What its prefix of so many tokens goes by (a block hash); asked
            for multiples of the scheduler block, and for ``hit_tokens``.
        declared: Positions above the hit at which it keeps tails because its client
            said so.
    """

    num_tokens: int
    hit_tokens: int
    junctions: Sequence[int]
    prefix_key: PrefixKey
    declared: Sequence[int] = ()

    @property
    def longest_hit_tokens(self) -> int:
        """What some KV-cache group can reuse."""
        return max(self.hit_tokens, *self.junctions, 0)


class TailPlacement:
    """Learns where siblings part, and gives prompts tails for the first of them.

    Call :meth:`observe` and then :meth:`place` once a request, when its lookup has
    finished; each is deterministic, takes microseconds and keeps a bounded memory.
    Nothing is placed before siblings were seen to miss, nor where what was learned
    says that a tail would bring less than it costs; with the traffic that taught it,
    what was learned goes (see :class:`PartingRates`).

    A tail is one position, with EAGLE too: the distances that are learned have room
    for the proof block, so what was predicted can be proven.
    """

    def __init__(
        self,
        max_tails: int,
        scheduler_block_size: int,
        use_eagle: bool,
        dense_span_tokens: int | None = None,
        chunk_tokens: int = 0,
    ) -> None:
        """Start with nothing learned.

        Args:
            max_tails: Most predicted tails of a prompt, 0 to 4.
            scheduler_block_size: Tokens per scheduler block; tails lie on multiples.
            use_eagle: Whether any group drops its last matched block for a drafter.
            dense_span_tokens: Over how many tokens dense retention spends the bytes
                of one tail: a window, or a scheduler block where that is longer.
                None: a scheduler block.
            chunk_tokens: Tokens of a prefill chunk, where a chunk has to end at each
                tail; see :func:`~vllm.junctions.rules.boundaries.at_chunk_end`.

        Raises:
            ValueError: A number is out of its range.
        """
        span_tokens = dense_span_tokens
        if span_tokens is None:
            span_tokens = scheduler_block_size
        _check(max_tails, scheduler_block_size, span_tokens)
        self._max_tails = max_tails
        self._block_tokens = scheduler_block_size
        self._use_eagle = use_eagle
        self._price_tokens = _BREAK_EVEN_HIT_RATE * span_tokens
        self._owners = PrefixOwners(scheduler_block_size)
        self._rates = PartingRates(scheduler_block_size)
        self._distance_tokens = self._rates.distances * scheduler_block_size
        self._chunk_tokens = chunk_tokens
        self._unused = UnusedTails()
        self._trust = _Trust()

    def observe(self, lookup: FinishedLookup) -> int:
        """Learn from a request where it parted from the prompt that it shares with.

        Returns:
            About how many tokens a predicted tail saved it; 0 where none served it.
            Later users of the same tail do not count: without it they would have hit
            the junction that the first one found.
        """
        if not self._max_tails:
            return 0
        without_tokens = None
        if lookup.hit_tokens:
            without_tokens = self._unused.take(lookup.prefix_key(lookup.hit_tokens))
        is_served = without_tokens is not None
        shared_tokens = self._provable_tokens(lookup)
        if not is_served and shared_tokens <= lookup.hit_tokens:
            return 0
        owner = self._owner(lookup, shared_tokens)
        self._trust.add_sibling(
            is_served,
            is_missed=not is_served
            and any(lookup.hit_tokens < tail <= shared_tokens for tail in owner.tails),
        )
        self._rates.add_sibling(
            owner.num_tokens - shared_tokens, owner.num_added_tokens
        )
        return 0 if without_tokens is None else lookup.hit_tokens - without_tokens

    def place(
        self, lookup: FinishedLookup, max_tails: int = MAX_TAILS
    ) -> tuple[int, ...]:
        """Return where the request should keep tails besides those it keeps anyway.

        Args:
            lookup: What :meth:`observe` saw.
            max_tails: Most tails of this request, if that is less than of any.

        Returns:
            Ascending multiples of the scheduler block above the hit and within the
            request, at most ``max_tails``, none of them a junction, declared or the
            replay tail. Below its hit a request has no more than the hit's own tail.
        """
        if not self._max_tails:
            return ()
        num_added_tokens = lookup.num_tokens - lookup.longest_hit_tokens
        max_tails = min(max_tails, self._max_tails)
        chosen = self._choose(lookup, num_added_tokens, max_tails)
        self._trust.add_prompt()
        self._rates.add_prompt(num_added_tokens)
        owner = Owner(lookup.num_tokens, num_added_tokens, tuple(sorted(chosen)))
        self._owners.add(owner, lookup.hit_tokens, lookup.prefix_key)
        for position, without_tokens in chosen.items():
            self._unused.add(lookup.prefix_key(position), without_tokens)
        return owner.tails

    def _provable_tokens(self, lookup: FinishedLookup) -> int:
        """Return the highest position at which a tail would have served the lookup."""
        longest = lookup.longest_hit_tokens - self._use_eagle * self._block_tokens
        return max(
            longest // self._block_tokens * self._block_tokens, lookup.hit_tokens
        )

    def _owner(self, lookup: FinishedLookup, shared_tokens: int) -> Owner:
        """Return the prompt that a lookup shares with.

        Another instance may have stored it. Prompts that share are much alike, so the
        request itself stands for it then; and as others' siblings are counted here
        for the own ones that are counted there, rates stay right.
        """
        owner = self._owners.find(lookup.longest_hit_tokens, lookup.prefix_key)
        if owner is None or owner.num_tokens < shared_tokens:
            num_tokens = lookup.num_tokens
            return Owner(num_tokens, num_tokens - lookup.hit_tokens, ())
        return owner

    def _choose(
        self, lookup: FinishedLookup, num_added_tokens: int, max_tails: int
    ) -> dict[int, int]:
        """Return new tails, and what their first user would hit without them."""
        if max_tails <= 0 or self._trust.is_spent():
            return {}
        positions = self._positions(lookup)
        num_siblings = self._rates.siblings_within(num_added_tokens)
        num_siblings = num_siblings[: len(positions) + 1]
        # As if all found their tail, at a price that makes up for it.
        price_tokens = self._price_tokens / self._trust.found_share
        # Nobody can gain more than the whole prompt.
        if num_siblings.item(-1) * lookup.num_tokens <= price_tokens:
            return {}
        known = np.array(self.known_positions(lookup), dtype=float)
        other_tokens = known[known.searchsorted(positions, "right") - 1]
        indices = best_tails(
            positions, num_siblings, other_tokens, max_tails, price_tokens
        )
        if not indices:
            return {}
        self._trust.add_due(num_siblings.item(indices[-1] + 1))
        return {positions.item(i): int(other_tokens[i]) for i in indices}

    def _positions(self, lookup: FinishedLookup) -> np.ndarray:
        """Return where siblings at each distance can resume at least, above the hit."""
        num_blocks = lookup.num_tokens // self._block_tokens
        num_computed_blocks = num_blocks - lookup.hit_tokens // self._block_tokens
        num_useful = self._rates.num_distances_below(num_computed_blocks)
        end = num_blocks * self._block_tokens
        positions = end - self._distance_tokens[:num_useful]
        if not self._chunk_tokens:
            return positions
        start = lookup.hit_tokens // self._block_tokens * self._block_tokens
        return np.array(
            [at_chunk_end(p, start, self._chunk_tokens) for p in positions.tolist()],
            dtype=positions.dtype,
        )

    def known_positions(self, lookup: FinishedLookup) -> list[int]:
        """Return where a sibling can resume without a predicted tail, ascending."""
        block_tokens = self._block_tokens
        replay = (lookup.num_tokens - 1) // block_tokens * block_tokens
        if self._use_eagle:
            replay = (lookup.num_tokens // block_tokens - 1) * block_tokens
        known = {0, lookup.hit_tokens, max(replay, 0)}
        return sorted(known.union(lookup.junctions, lookup.declared))


class _Trust:
    """Whether predicted tails serve those whom they are placed for."""

    def __init__(self) -> None:
        self._num_due = 0.0
        # Of first siblings that a tail was placed for: the others' was evicted, or
        # not saved yet.
        self.found_share = 1.0

    def add_prompt(self) -> None:
        """Forget misses as all that is learned is forgotten, so that tails get tried.

        By a factor: what is near to nothing grows slowly, and few are tried.
        """
        self.found_share = min(self.found_share / FADE, 1.0)

    def add_due(self, num_siblings: float) -> None:
        """Count siblings that tails were placed for just now."""
        self._num_due += num_siblings * self.found_share

    def add_sibling(self, is_served: bool, is_missed: bool) -> None:
        """Count one who was served, one whose tail was missing, or one without."""
        if is_served:
            self.found_share += _FOUND_STEP * (1 - self.found_share)
        elif is_missed:
            self.found_share -= _FOUND_STEP * self.found_share
        if not is_missed:
            self._num_due = 0.0

    def is_spent(self) -> bool:
        """Return whether many siblings were due and none came."""
        return self._num_due > _MAX_DUE


def _check(max_tails: int, scheduler_block_size: int, span_tokens: int) -> None:
    if not 0 <= max_tails <= MAX_TAILS:
        raise ValueError(f"max_tails must be 0 to {MAX_TAILS}, got {max_tails}")
    if scheduler_block_size <= 0:
        raise ValueError(
            f"scheduler_block_size must be positive, got {scheduler_block_size}"
        )
    if span_tokens <= 0:
        raise ValueError(f"dense_span_tokens must be positive, got {span_tokens}")

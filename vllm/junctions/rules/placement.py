# SPDX-License-Identifier: Apache-2.0
"""Predicted tails: where a prompt's first sibling will part, learned from lookups.

A junction is found by the first sibling, which pays the whole prefill. But siblings
part at much the same distance from the end of the prompt that they share with: a
question behind a document, a turn behind a history. So an extra tail at that distance
serves the first sibling as well. Nothing in this module knows about vLLM's objects.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vllm.junctions.rules.siblings import (
    FADE,
    Owner,
    PartingRates,
    PrefixKey,
    PrefixOwners,
)
from vllm.junctions.rules.tails import TailShape

MAX_TAILS = 4

# The hit rate at which dense retention would be worth its bytes: a predicted tail has
# to bring as many tokens as that, per byte, or it is not placed.
_BREAK_EVEN_HIT_RATE = 0.4
_MAX_REMEMBERED_TAILS = 1 << 12
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
    """

    num_tokens: int
    hit_tokens: int
    junctions: Sequence[int]
    prefix_key: PrefixKey

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
    ) -> None:
        """Start with nothing learned.

        Args:
            max_tails: Most predicted tails of a prompt, 0 to 4.
            scheduler_block_size: Tokens per scheduler block; tails lie on multiples.
            use_eagle: Whether any group drops its last matched block for a drafter.
            dense_span_tokens: Over how many tokens dense retention spends the bytes
                of one tail: a window, or a scheduler block where that is longer.
                None: a scheduler block.

        Raises:
            ValueError: A number is out of its range.
        """
        if not 0 <= max_tails <= MAX_TAILS:
            raise ValueError(f"max_tails must be 0 to {MAX_TAILS}, got {max_tails}")
        if scheduler_block_size <= 0:
            raise ValueError(
                f"scheduler_block_size must be positive, got {scheduler_block_size}"
            )
        span_tokens = scheduler_block_size
        if dense_span_tokens is not None:
            span_tokens = dense_span_tokens
        if span_tokens <= 0:
            raise ValueError(f"dense_span_tokens must be positive, got {span_tokens}")
        self._max_tails = max_tails
        self._block_tokens = scheduler_block_size
        self._use_eagle = use_eagle
        self._price_tokens = _BREAK_EVEN_HIT_RATE * span_tokens
        self._owners = PrefixOwners(scheduler_block_size)
        self._rates = PartingRates(scheduler_block_size)
        # Tails not used yet, and what their first user would have hit without.
        self._tails: OrderedDict[Hashable, int] = OrderedDict()
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
        without_tokens = lookup.hit_tokens
        is_served = False
        if lookup.hit_tokens:
            key = lookup.prefix_key(lookup.hit_tokens)
            is_served = key in self._tails
            without_tokens = self._tails.pop(key, lookup.hit_tokens)
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
        return lookup.hit_tokens - without_tokens

    def place(self, lookup: FinishedLookup) -> tuple[int, ...]:
        """Return where the request should keep tails besides those it keeps anyway.

        Args:
            lookup: What :meth:`observe` saw.

        Returns:
            Ascending multiples of the scheduler block above the hit and within the
            request, at most ``max_tails``, none of them a junction or the replay
            tail. Below its hit a request has no more than the hit's own tail.
        """
        if not self._max_tails:
            return ()
        num_added_tokens = lookup.num_tokens - lookup.longest_hit_tokens
        chosen = self._choose(lookup, num_added_tokens)
        self._trust.add_prompt()
        self._rates.add_prompt(num_added_tokens)
        owner = Owner(lookup.num_tokens, num_added_tokens, tuple(sorted(chosen)))
        self._owners.add(owner, lookup.hit_tokens, lookup.prefix_key)
        for position, without_tokens in chosen.items():
            self._tails[lookup.prefix_key(position)] = without_tokens
        while len(self._tails) > _MAX_REMEMBERED_TAILS:
            self._tails.popitem(last=False)
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

    def _choose(self, lookup: FinishedLookup, num_added_tokens: int) -> dict[int, int]:
        """Return new tails, and what their first user would hit without them."""
        if self._trust.is_spent():
            return {}
        positions = self._positions(lookup)
        rates = self._rates.siblings_per_prompt(num_added_tokens)[: len(positions)]
        rates = rates * self._trust.found_share
        # Nobody can gain more than the whole prompt.
        if rates.sum() * lookup.num_tokens <= self._price_tokens:
            return {}
        known = self._known_positions(lookup)
        other_tokens = known[known.searchsorted(positions, side="right") - 1]
        indices = best_tails(
            positions, rates, other_tokens, self._max_tails, self._price_tokens
        )
        self._trust.add_due(rates[: max(indices) + 1].sum() if indices else 0)
        return {
            int(positions[index]): int(other_tokens[index])
            for index in indices
            if positions[index] not in known
        }

    def _positions(self, lookup: FinishedLookup) -> np.ndarray:
        """Return where siblings at each distance can resume at least, above the hit."""
        num_blocks = lookup.num_tokens // self._block_tokens
        num_computed_blocks = num_blocks - lookup.hit_tokens // self._block_tokens
        num_useful = self._rates.num_distances_below(num_computed_blocks)
        distances = self._rates.distances[:num_useful]
        return (num_blocks - distances) * self._block_tokens

    def _known_positions(self, lookup: FinishedLookup) -> np.ndarray:
        """Return the positions at which a sibling can resume anyway, ascending."""
        block_tokens = self._block_tokens
        replay = (lookup.num_tokens - 1) // block_tokens * block_tokens
        if self._use_eagle:
            replay = (lookup.num_tokens // block_tokens - 1) * block_tokens
        known = {0, lookup.hit_tokens, max(replay, 0), *lookup.junctions}
        return np.array(sorted(known))


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
        self._num_due += num_siblings

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


def dense_span_tokens(tails: Iterable[TailShape], scheduler_block_size: int) -> int:
    """Return over how many tokens dense retention spends the blocks of one tail.

    It keeps a tail at each scheduler block; where windows are longer than that, tails
    overlap and share blocks. Scheduler blocks of 256, windows of 128 in blocks of 64:
    256. Scheduler blocks of 16, windows of 1,024: 1,024.

    Args:
        tails: Of the groups that need one, all with blocks of the same bytes.
        scheduler_block_size: Tokens per scheduler block.
    """
    num_tail_blocks = num_dense_blocks = 0.0
    for tail in tails:
        num_blocks = tail.num_blocks[tail.drops]
        num_tail_blocks += num_blocks
        num_dense_blocks += min(num_blocks, scheduler_block_size / tail.block_tokens)
    if not num_tail_blocks:
        return scheduler_block_size
    return round(scheduler_block_size * num_tail_blocks / num_dense_blocks)


@lru_cache(maxsize=256)
def _upper_only(num_positions: int) -> np.ndarray:
    """Return what rules out tails that are not below another: 0, or minus infinity."""
    is_lower = np.tri(num_positions, k=-1, dtype=bool)
    return np.where(is_lower, 0.0, -np.inf)


def best_tails(
    positions: np.ndarray,
    rates: np.ndarray,
    other_tokens: np.ndarray,
    max_tails: int,
    price_tokens: float,
) -> list[int]:
    """Choose the tails that bring the most hit tokens beyond their price.

    A sibling uses the highest tail at or below the position up to which it shares.
    Exact, by dynamic programming over the lowest tail chosen so far. Two siblings to
    expect at 4,096 tokens and one at 1,024, nothing to hit without, a price of 100:
    one tail lies at 4,096 (8,192 tokens gained), two at both.

    Source: the recurrence of Sparse Prefix Caching (arXiv 2605.05219), with tails
    that exist anyway and a price for each.

    Args:
        positions: Up to where siblings share, descending; tails can lie there.
        rates: How many siblings to expect that share up to each.
        other_tokens: What those hit without any of these tails.
        max_tails: Most tails to choose, at least 1.
        price_tokens: Hit tokens that a tail has to bring.

    Returns:
        Indices into ``positions``, ascending; empty where no tail pays.
    """
    if not len(positions):
        return []
    # gained[b, a]: by the siblings down to b, from a tail at a.
    gained = np.maximum(positions - other_tokens[:, None], 0) * rates[:, None]
    gained = gained.cumsum(axis=0)
    by_one = gained.diagonal()
    values = [by_one - price_tokens]
    above: list[np.ndarray] = []
    if max_tails > 1:
        # added[b, a]: what the next lower tail at b adds to one at a.
        added = by_one[:, None] - gained.T
        added += _upper_only(len(positions)) - price_tokens
        order = np.arange(len(positions))
        for _ in range(max_tails - 1):
            totals = values[-1] + added
            above.append(totals.argmax(axis=1))
            values.append(totals[order, above[-1]])
    num_tails = int(np.argmax([value.max() for value in values])) + 1
    index = int(values[num_tails - 1].argmax())
    if values[num_tails - 1][index] <= 0:
        return []
    indices = [index]
    for chosen_above in reversed(above[: num_tails - 1]):
        indices.append(int(chosen_above[indices[-1]]))
    return indices[::-1]

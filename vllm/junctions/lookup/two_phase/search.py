# SPDX-License-Identifier: Apache-2.0
"""Store lookups that ask only for the keys that could matter.

Stock asks at once for every full-attention block and for the tails of every sparse
group at every aligned position. Sparse retention stored next to none of those tails,
so nearly all answers are "no". Here vLLM's own search decides what is asked: it runs
over a pool that does not know its answers yet and gets them from the store in batches.

- Full attention is asked for first, from the front, with the tails at the top beside.
- The search in a sliding-window or Mamba group goes down from there. One missing block
  of a tail disproves the position, so one key a position is asked for (*evidence*),
  and whole tails only where evidence is there.

Why the result is stock's: the joint search is ``MooncakeStoreCoordinator``'s, the
search in full-attention groups ``FullAttentionManager``'s, and every answer that they
read is the store's. Replaced are only the two searches that read every block on their
way down. Both look for the highest position whose tail is complete; a position that
lacks any block of its tail is no match, whatever the other blocks are. And a block
that stock's mask leaves out is in no tail.

Block hashes go through vLLM's search as numbers of hash units (0, 1, ...), so a hash
is read and written in hexadecimal only for a key that is asked for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
)
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from vllm.junctions.errors import JunctionsError
from vllm.junctions.lookup.two_phase.known_keys import (
    ABSENT,
    FIRST,
    PRESENT,
    Ask,
    KnownKeys,
    Wanted,
    has,
)
from vllm.junctions.lookup.two_phase.plan import LookupPlan, Tail


class Sweep(NamedTuple):
    """What is known of candidates, from one on down.

    Attributes:
        alive: Whether nothing speaks against it.
        touched: Whether a block of its tail is there.
        others_touched: Whether one is of each other sparse group's tail.
    """

    alive: np.ndarray
    touched: np.ndarray
    others_touched: np.ndarray


class AskingPool(ExternalCachedBlockPool):
    """A pool for one lookup that asks the store for what it does not know yet.

    Block hashes are numbers of hash units here.

    Attributes:
        lagging_group: The group that shortened the hit last.
    """

    def __init__(
        self,
        plan: LookupPlan,
        num_tokens: int,
        block_hashes: Sequence[BlockHash],
        ask: Ask,
    ) -> None:
        super().__init__(plan.hash_tokens)
        self._plan = plan
        self._num_tokens = num_tokens
        self._num_units = min(
            len(block_hashes),
            plan.coord.align_lookup_length(num_tokens) // plan.hash_tokens,
        )
        # What stock would not ask for is absent: nothing beyond these units.
        self.units = range(self._num_units)
        self._keys = KnownKeys(plan.key_stems, self._num_units, block_hashes, ask)
        self._full_units = 0
        self._round = 0
        self._last_round = plan.last_round(self._num_units)
        self._reach_tokens = 0
        self._present = [self._present_block] * len(plan.key_stems)
        self.lagging_group: int | None = None
        # Off where the reach of each sparse group is asked for.
        self.skips_positions = plan.skips_positions

    # What vLLM's search and the stock worker read

    def get_cached_block(
        self, block_hash: Any, group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """Return a block for each group if all of them have the hash unit."""
        for group_id in group_ids:
            state = self._keys.states[group_id][block_hash]
            if state < ABSENT:
                self._ask_full_attention(block_hash, group_ids)
                state = self._keys.states[group_id][block_hash]
            if state != PRESENT:
                return None
        return self._present[: len(group_ids)]

    def contains(self, group_id: int, block_hash: Any) -> bool:
        """Return whether a group has a loadable key for this hash unit."""
        states = self._keys.states[group_id]
        if states[block_hash] < ABSENT:
            self._keys.ask(Wanted(group_id, [block_hash]))
        return states[block_hash] == PRESENT

    # Asking

    def ask_first(self) -> None:
        """Ask for full attention from the front, and for the tails at the top."""
        wanted = self._extend_full_attention()
        if self._plan.coord.enable_partial_hash_hits and self.units:
            wanted += self._inside_block(self._num_units - 1)
        position = self._highest_position()
        wanted += self._tails_at(position)
        if self._plan.tails:
            tail = self._plan.tails[0]
            candidate = self._highest_candidate(
                tail, self._num_units * self.hash_block_size, tail.shape.drops
            )
            wanted += self._evidence(tail, candidate, tail.shape.drops)
        self._round = 1
        self._keys.ask(*wanted)

    def ask_last_keys(self, hit_length: int) -> None:
        """Ask for what tells the key of each group's last block of a partial hit."""
        unit = hit_length // self.hash_block_size - 1
        if unit < 0 or not self._plan.coord.enable_partial_hash_hits:
            return
        wanted = []
        for group in self._plan.coord.attention_groups:
            units = group.spec.block_size // self.hash_block_size
            end = min((unit // units + 1) * units, self._num_units)
            for group_id in group.group_ids:
                if self._keys.states[group_id][unit] != PRESENT:
                    wanted.append(Wanted(group_id, range(unit, end)))
        self._keys.ask(*wanted)

    # Full attention

    def _ask_full_attention(self, unit: int, group_ids: list[int]) -> None:
        while unit >= self._full_units:
            self._keys.ask(*self._extend_full_attention())
        if any(self._keys.states[group_id][unit] < ABSENT for group_id in group_ids):
            self._keys.ask(*self._inside_block(unit))

    def _extend_full_attention(self) -> list[Wanted]:
        """Return the next blocks of all full-attention groups, from the front."""
        start = self._full_units
        end = max(start * self._plan.batches.full_growth, self._plan.first_full_units)
        end = min(end, self._num_units)
        self._full_units = end
        return [
            Wanted(group_id, range(start + units - 1, end, units))
            for group_ids, units in self._plan.full_groups
            for group_id in group_ids
        ]

    def _inside_block(self, unit: int) -> list[Wanted]:
        """Return all units of the block of each full-attention group around one."""
        return [
            Wanted(group_id, range(start, min(start + units, self._num_units)))
            for group_ids, units in self._plan.full_groups
            for start in [unit // units * units]
            for group_id in group_ids
        ]

    # Tails

    def longest_tail_hit(self, tail: Tail, max_length: int, drop: bool) -> int:
        """Return the longest hit of one sparse group, in tokens.

        Args:
            tail: The group, or several of one spec.
            max_length: Tokens that may be matched, the proof block included.
            drop: Whether the last matched block is dropped.
        """
        self._reach_tokens = max(self._reach_tokens, max_length)
        top = self._highest_candidate(tail, max_length, drop)
        length = 0
        candidate = self._next_alive(tail, top, drop)
        while candidate is not None:
            first, end = tail.shape.window(candidate, drop)
            windows = self._keys.windows(tail, first, end)
            if all(window.count(PRESENT) == end - first for window in windows):
                length = tail.shape.hit_tokens(candidate, drop)
                break
            self._ask_tails(tail, candidate, drop)
            candidate = self._next_alive(tail, candidate, drop)
        if length < tail.shape.hit_tokens(top, drop):
            self.lagging_group = tail.group_ids[0]
        return length

    def _next_alive(self, tail: Tail, candidate: int, drop: bool) -> int | None:
        """Return the highest candidate from one on down that nothing speaks against."""
        if tail.shape.hit_tokens(candidate, drop) == 0:
            return None
        if self._is_alive(tail, candidate, drop):
            return candidate
        alive = np.flatnonzero(self._sweep(tail, candidate, drop).alive)
        if len(alive) == 0:
            return None
        return candidate - int(alive[0]) * tail.shape.step

    def _is_alive(self, tail: Tail, candidate: int, drop: bool) -> bool:
        windows = self._keys.windows(tail, *tail.shape.window(candidate, drop))
        if self.skips_positions:
            position = tail.shape.position(candidate, drop)
            for other in self._plan.tails:
                if other is not tail:
                    windows += self._keys.windows(
                        other, *other.shape.blocks_at(position)
                    )
        return not any(ABSENT in window for window in windows)

    def _sweep(self, tail: Tail, candidate: int, drop: bool) -> Sweep:
        """Return what is known of each candidate from one on down that gives a hit."""
        step = tail.shape.step
        count = max(candidate // step + 1, 0)
        while count and not tail.shape.hit_tokens(candidate - (count - 1) * step, drop):
            count -= 1
        need = tail.shape.num_blocks[drop]
        known = self._keys.rows(tail, candidate + 1 - need, need, step, count)
        alive, touched = ~has(known, ABSENT), has(known, PRESENT, FIRST)
        others_touched = np.ones(count, bool)
        end = tail.shape.position(candidate, drop)
        for other in self._plan.tails:
            if other is not tail:
                block_tokens, drops = other.shape.block_tokens, other.shape.drops
                need = other.shape.num_blocks[False]
                known = self._keys.rows(
                    other,
                    end // block_tokens - need,
                    need + drops,
                    step * tail.shape.block_tokens // block_tokens,
                    count,
                )
                others_touched &= has(known, PRESENT, FIRST)
                if self.skips_positions:
                    alive &= ~has(known, ABSENT)
        return Sweep(alive, touched, others_touched)

    def _highest_candidate(self, tail: Tail, max_length: int, drop: bool) -> int:
        num_blocks = min(
            max_length // tail.shape.block_tokens,
            self._num_units // tail.units_per_block,
        )
        return tail.shape.highest(num_blocks, drop)

    def _ask_tails(self, tail: Tail, candidate: int, drop: bool) -> None:
        """Ask for the tails at one candidate, and for some of what may be next."""
        if self._round >= self._last_round:
            wanted = self._all_tails()
        else:
            wanted = self._tails_at(tail.shape.position(candidate, drop))
            wanted += self._evidence(tail, candidate, drop)
        first, end = tail.shape.window(candidate, drop)
        self._round += 1
        self._keys.ask(*self._blocks(tail, first, end), *wanted)

    def _evidence(self, tail: Tail, candidate: int, drop: bool) -> list[Wanted]:
        """Return one key for each of the next candidates that may be complete.

        Where evidence is there already, the whole tail and evidence of the other
        groups, where that is there as well, all tails; and nothing further down until
        these are known. Both numbers grow from batch to batch.
        """
        batches = self._plan.batches
        num_positions = batches.evidence * batches.evidence_growth**self._round
        num_tails = batches.tail_growth**self._round
        sweep = self._sweep(tail, candidate, drop)
        alive = np.flatnonzero(sweep.alive)
        touched = sweep.touched[alive]
        changes = np.flatnonzero(touched != touched[:1])
        alive = alive[: changes[0]] if len(changes) else alive
        if len(touched) and touched[0]:
            return [
                wanted
                for index in alive[:num_tails].tolist()
                for wanted in self._tails_below(
                    tail,
                    candidate - index * tail.shape.step,
                    drop,
                    sweep.others_touched[index],
                )
            ]
        evidence: list[int] = []
        below = candidate + 1
        for index in alive.tolist():
            one = candidate - index * tail.shape.step
            if one >= below:
                # Disproved as well, if the evidence before is absent.
                continue
            below, _ = tail.shape.window(one, drop)
            evidence.append((below + 1) * tail.units_per_block - 1)
            if len(evidence) == num_positions:
                break
        return [Wanted(tail.group_ids[0], evidence, all_ranks=False)]

    def _tails_below(
        self, tail: Tail, candidate: int, drop: bool, all_groups: bool
    ) -> list[Wanted]:
        position = tail.shape.position(candidate, drop)
        if all_groups:
            return self._tails_at(position)
        wanted = self._blocks(tail, *tail.shape.window(candidate, drop))
        return wanted + self._evidence_of_others(tail, position)

    def _evidence_of_others(self, tail: Tail, position: int) -> list[Wanted]:
        """Return one key at a position for each other sparse group."""
        wanted = []
        for other in self._plan.tails:
            first, _ = other.shape.blocks_at(position)
            unit = (first + 1) * other.units_per_block - 1
            if other is not tail and unit < self._num_units:
                wanted.append(Wanted(other.group_ids[0], [unit], all_ranks=False))
        return wanted

    def _tails_at(self, position: int) -> list[Wanted]:
        """Return the tails of all sparse groups at one position."""
        wanted: list[Wanted] = []
        if position == 0:
            # A proof block of the empty prefix proves nothing.
            return wanted
        for tail in self._plan.tails:
            first, end = tail.shape.blocks_at(position)
            end = min(end, self._num_units // tail.units_per_block)
            wanted += self._blocks(tail, first, end)
        return wanted

    def _all_tails(self) -> list[Wanted]:
        """Return the tails of all sparse groups at all positions within reach."""
        alignment = self._plan.coord.align_unit
        return [
            wanted
            for position in range(self._reach_tokens // alignment, 0, -1)
            for wanted in self._tails_at(position * alignment)
        ]

    def _blocks(self, tail: Tail, first: int, end: int) -> list[Wanted]:
        units = tail.units_per_block
        return [
            Wanted(group_id, range(first * units + units - 1, end * units, units))
            for group_id in tail.group_ids
        ]

    def _highest_position(self) -> int:
        """Return the highest position at which the request could resume."""
        coord = self._plan.coord
        position = coord.align_lookup_length(
            min(self._num_tokens - 1, self._num_units * self.hash_block_size)
        )
        if coord.eagle_group_ids:
            top = self._num_units * self.hash_block_size - coord.align_unit
            position = min(position, top)
        return max(position, 0)


class Findings(NamedTuple):
    """What a lookup found. Lengths in tokens.

    Attributes:
        hit_length: The joint hit.
        longest_hit_length: As :meth:`JunctionStoreCoordinator.longest_group_hit`.
        lagging_group: A sparse group that keeps the joint hit below the longest, if
            it is known.
        pool: The existence answers.
    """

    hit_length: int
    longest_hit_length: int
    lagging_group: int | None
    pool: ExternalCachedBlockPool


class StoreCallError(JunctionsError):
    """The store raised instead of answering."""


def look_up(
    plan: LookupPlan, num_tokens: int, block_hashes: Sequence[BlockHash], ask: Ask
) -> Findings | None:
    """Find the joint hit and the longest one; None if nothing could be stored.

    Source: gives what ``MooncakeStoreWorker.lookup`` finds.

    Args:
        plan: The layout.
        num_tokens: Tokens of the request.
        block_hashes: Its block hashes, one per hash unit.
        ask: The call to the store. Whatever it raises ends the lookup.
    """
    coord = plan.search
    lookup_tokens = coord.align_lookup_length(num_tokens)
    if not block_hashes or lookup_tokens <= 0:
        return None
    pool = AskingPool(plan, num_tokens, block_hashes, ask)
    pool.ask_first()
    units = cast(Sequence[BlockHash], pool.units)
    _, hit_length = coord.find_longest_cache_hit(units, lookup_tokens, pool)
    usable_tokens = coord.align_lookup_length(num_tokens - 1)
    if hit_length >= num_tokens:
        # The last token is always computed.
        if usable_tokens <= 0:
            return None
        _, hit_length = coord.find_longest_cache_hit(units, usable_tokens, pool)
    pool.ask_last_keys(hit_length)
    lagging_group = pool.lagging_group
    pool.skips_positions = False
    longest = coord.longest_group_hit(units, usable_tokens, pool)
    if longest <= hit_length:
        lagging_group = None
    return Findings(hit_length, longest, lagging_group, pool)

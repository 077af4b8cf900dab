# SPDX-License-Identifier: Apache-2.0
"""The search for the highest tail that is complete, in sparse groups, as it asks.

One missing block disproves a position, so one key a position is asked for first
(*evidence*), and whole tails only where evidence is there.
"""

from typing import NamedTuple

import numpy as np

from vllm.junctions.lookup.two_phase.asked_keys import (
    ABSENT,
    FIRST,
    PRESENT,
    AskedKeys,
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


class TailSearch:
    """The searches of one lookup in its sparse groups.

    Attributes:
        lagging_group: The group that shortened the hit last.
        skips_positions: Whether a search passes over positions that another group
            cannot use. Off where the reach of each group is asked for.

    Args:
        plan: The layout.
        keys: The keys of the request.
    """

    def __init__(self, plan: LookupPlan, keys: AskedKeys) -> None:
        self._plan = plan
        self._keys = keys
        self._num_units = keys.num_units
        self._round = 0
        self._last_round = plan.last_round(keys.num_units)
        self._reach_tokens = 0
        self._tail_by_group = {tail.group_ids[0]: tail for tail in plan.tails}
        self.lagging_group: int | None = None
        self.skips_positions = plan.skips_positions

    def first_wanted(self, position: int) -> list[Wanted]:
        """Return the tails at the highest position, and evidence further down.

        Args:
            position: Where the request could resume at best, in tokens.
        """
        wanted = self._tails_at(position)
        if self._plan.tails:
            tail = self._plan.tails[0]
            num_tokens = self._num_units * self._plan.hash_tokens
            candidate = self._highest_candidate(tail, num_tokens, tail.shape.drops)
            wanted += self._evidence(tail, candidate, tail.shape.drops)
        self._round = 1
        return wanted

    def longest_hit(self, group_ids: list[int], max_length: int, drop: bool) -> int:
        """Return the longest hit in tokens; see :class:`.managers.TailPool`."""
        tail = self._tail_by_group[group_ids[0]]
        # A recurrent group drops nothing.
        drop = drop and tail.shape.drops
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

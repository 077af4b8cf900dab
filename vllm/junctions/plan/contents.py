# SPDX-License-Identifier: Apache-2.0
"""What caches have of prefixes, and what a prompt can resume from.

Full attention is there up to where a prefix is cached; tails are marked one by one.
Where tails are longer than a scheduler block, two of them may cover positions in
between, see :mod:`vllm.junctions.plan.overlaps`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.junctions.plan import overlaps
from vllm.junctions.plan.policies import Policy
from vllm.junctions.plan.shape import Shape
from vllm.junctions.plan.tree import Edge, add_mark, who_has
from vllm.junctions.rules.boundaries import merge_boundaries


class Row(NamedTuple):
    """What caches have of one stretch of a prompt, in tokens.

    Attributes:
        has: Where marks are: ``tails``, ``lows`` and ``covers``.
        start: Where the stretch begins.
        end: Where it ends, or what is cached of it.
        dense_from: From where on policies that keep tails at fixed places have them.
    """

    has: Any
    start: int
    end: int
    dense_from: int


@dataclass(frozen=True)
class Kept:
    """Tails that a request leaves under one policy.

    Attributes:
        hit_tokens: Where it resumed; it has no tail below.
        positions: Where it keeps tails, in tokens, ascending.
    """

    hit_tokens: int
    positions: tuple[int, ...]

    @classmethod
    def of(
        cls, hit_tokens: int, replays: tuple[int, ...], others: tuple[int, ...]
    ) -> "Kept":
        """Return the tails at its replays and at others, as far as it has them."""
        found = merge_boundaries(replays, others) if others else replays
        return cls(hit_tokens, tuple(one for one in found if one >= hit_tokens))


def bits(who: int) -> Iterator[int]:
    """Yield the numbers of the caches in a set."""
    while who:
        lowest = who & -who
        yield lowest.bit_length() - 1
        who ^= lowest


class Contents:
    """Marks of one or more caches, one a policy, that see the same prompts."""

    def __init__(self, shape: Shape, policies: Sequence[Policy]) -> None:
        self.shape = shape
        self._policies = policies
        self._sparse = 0
        self._fixed: list[int | None] = []
        for index, policy in enumerate(policies):
            is_dense = shape.is_dense(policy)
            if not policy.full_attention_only and not is_dense:
                self._sparse |= 1 << index
            interval = policy.retention_interval
            self._fixed.append(shape.block if is_dense else interval or None)

    def hits(self, rows: list[Row], num_tokens: int) -> list[int]:
        """Return what a prompt can reuse under each policy, in tokens."""
        reach = rows[-1].end if rows else 0
        top = self.shape.top(num_tokens, reach)
        hits = [0] * len(self._policies)
        for index, policy in enumerate(self._policies):
            if policy.full_attention_only:
                hits[index] = self.shape.longest(num_tokens, reach)
            elif self._fixed[index] and top:
                hits[index] = _fixed_hit(rows, top, self._fixed[index] or 1)
        if top:
            self._add_marked(rows, reach, top, hits)
            if self.shape.overlaps:
                self._add_between(rows, top, hits)
        return hits

    def _add_marked(
        self, rows: list[Row], reach: int, top: int, hits: list[int]
    ) -> None:
        todo, proof = self._sparse, self.shape.tail_proof
        for row in reversed(rows):
            marks = row.has.tails
            if not marks:
                continue
            for index in range(len(marks) - 2, -1, -2):
                end = marks[index]
                found = marks[index + 1] & todo
                if not found or end > reach or end - proof > top:
                    continue
                for who in bits(found):
                    hits[who] = max(hits[who], end - proof)
                todo ^= found
                if not todo:
                    return

    def _add_between(self, rows: list[Row], top: int, hits: list[int]) -> None:
        """Go on from the last tail as far as others cover what follows it."""
        for who in bits(self._sparse):
            if hits[who] < top:
                end = overlaps.covered_up_to(self._covers(rows, who), hits[who])
                provable = self.shape.floor(max(end - self.shape.tail_proof, 0))
                hits[who] = max(hits[who], min(provable, top))

    def _covers(self, rows: list[Row], who: int) -> list[tuple[int, int]]:
        found = [
            (low, min(high, row.end))
            for row in rows
            for low, high, caches in row.has.covers or ()
            if caches >> who & 1
        ]
        interval = self._fixed[who]
        if interval and rows:
            end, window = rows[-1].end, self.shape.window
            found += [
                (max(position - window, 0), min(position, end))
                for position in range(interval, end + interval, interval)
            ]
        return sorted(found)

    def put(
        self, rows: list[Row], reach: int, end: int, kept: Sequence[Kept]
    ) -> list[int]:
        """Mark what a request keeps; return new tail blocks, by policy.

        Args:
            rows: The request's, up to ``end``.
            reach: What of it was cached before, in tokens.
            end: Whole scheduler blocks of its prompt, in tokens.
            kept: By policy.
        """
        num_new = [0] * len(kept)
        by_position: dict[int, int] = {}
        by_interval: dict[int | None, int] = {}
        for who, one in enumerate(kept):
            interval = self._fixed[who]
            if self._policies[who].full_attention_only:
                continue
            if interval and reach < end:
                given = self._policies[who].retention_interval
                if given not in by_interval:
                    by_interval[given] = self.shape.dense_blocks(reach, end, given)
                num_new[who] += by_interval[given]
            if self._sparse >> who & 1:
                for position in one.positions:
                    # No fixed place lies at a prompt's start.
                    if not interval or not position or position % interval:
                        by_position[position] = by_position.get(position, 0) | 1 << who
        for position in sorted(by_position):
            self._mark(rows, position, end, by_position[position], num_new)
        return num_new

    def _mark(
        self, rows: list[Row], position: int, end: int, who: int, num_new: list[int]
    ) -> None:
        shape = self.shape
        low_row = _row_at(rows, position)
        if low_row is not None:
            known = low_row.has.lows if shape.tail_proof else low_row.has.tails
            new = who & ~who_has(known, position)
            if new and shape.overlaps:
                self._cover(rows, position, new, num_new)
            elif new:
                num_blocks = shape.low_blocks(position)
                for one in bits(new):
                    num_new[one] += num_blocks
            if shape.tail_proof:
                low_row.has.lows = add_mark(known, position, who)
        proven = position + shape.tail_proof
        row = _row_at(rows, proven)
        if row is None or proven > end:
            return
        if shape.tail_proof:
            for one in bits(who & ~who_has(row.has.tails, proven)):
                covers = self._covers(rows, one) if shape.overlaps else []
                if overlaps.num_uncovered(covers, position, proven):
                    num_new[one] += shape.proof_blocks
        row.has.tails = add_mark(row.has.tails, proven, who)

    def _cover(
        self, rows: list[Row], position: int, who: int, num_new: list[int]
    ) -> None:
        shape = self.shape
        low = max(position - shape.window, 0)
        for one in bits(who):
            missing = overlaps.num_uncovered(self._covers(rows, one), low, position)
            share = missing / (position - low)
            num_new[one] += round(share * shape.low_blocks(position))
        for row in rows:
            if row.start < position and row.end > low:
                row.has.covers = overlaps.add_cover(
                    row.has.covers, max(low, row.start), min(position, row.end), who
                )


def _row_at(rows: list[Row], position: int) -> Row | None:
    """Return the row whose tokens end at or behind a position above 0."""
    for row in reversed(rows):
        if row.start < position:
            return row if position <= row.end else None
    return None


def _fixed_hit(rows: list[Row], top: int, interval: int) -> int:
    """Return the last of the fixed places up to ``top`` at which tails are."""
    for row in reversed(rows):
        position = min(top, row.end) // interval * interval
        if position > row.start and position >= row.dense_from:
            return position
    return 0


class OpenStore(Contents):
    """Stores without a bound, all policies at once; the marks are on the tree's edges.

    All of them have the same blocks of full attention, so one walk along a prompt's
    edges answers for all.
    """

    def rows(self, path: list[Edge], num_tokens: int) -> list[Row]:
        """Return what is stored of a prompt's first ``num_tokens``."""
        unit = self.shape.layout.grain_tokens
        return [
            Row(
                edge,
                edge.start * unit,
                min(edge.end * unit, num_tokens),
                edge.start * unit,
            )
            for edge in path
        ]

# SPDX-License-Identifier: Apache-2.0
"""A cache with a bound, which forgets what was used least recently."""

import heapq
from dataclasses import dataclass
from itertools import count

from vllm.junctions.plan.contents import Contents, Kept, Row
from vllm.junctions.plan.policies import Policy
from vllm.junctions.plan.shape import Shape
from vllm.junctions.plan.tree import Edge, Marks, PrefixTree, _split_marks

_STALE_SHARE = 4


@dataclass(slots=True)
class Hold:
    """What one cache has of an edge.

    Attributes:
        reach: Where it ends, in tokens.
        dense_from: From where on tails at fixed places are there.
        num_blocks: Blocks of all groups.
        used: When it was used last.
    """

    reach: int
    dense_from: int
    num_blocks: int = 0
    used: int = 0
    tails: Marks | None = None
    lows: Marks | None = None
    covers: list[tuple[int, int, int]] | None = None


class BoundedCache(Contents):
    """One policy's cache of ``capacity_blocks``, the store's or an instance's own.

    Attributes:
        num_blocks: Blocks that it has.
        num_evicted: Blocks that it let go.
    """

    def __init__(
        self,
        shape: Shape,
        policy: Policy,
        tree: PrefixTree,
        capacity_blocks: int,
        is_all: bool = True,
    ) -> None:
        """Create an empty one.

        Args:
            shape: Of the layout.
            policy: Which tails it keeps.
            tree: All prefixes.
            capacity_blocks: Its bound.
            is_all: Whether a prefix that no bounded cache has can be forgotten. Not
                where there is a store without a bound.
        """
        super().__init__(shape, [policy])
        self.num_blocks = 0
        self.num_evicted = 0
        self._tree = tree
        self._unit = tree.unit_tokens
        self._capacity = capacity_blocks
        self._is_all = is_all
        self._num_holds = 0
        self._order = count()
        self._uses: list[tuple[int, int, int, Edge]] = []
        tree.on_split(self._split)

    def rows(self, path: list[Edge], num_tokens: int) -> list[Row]:
        """Return what is cached of a prompt's first ``num_tokens``."""
        rows = []
        for edge in path:
            hold = edge.holds.get(self) if edge.holds else None
            if hold is None:
                break
            start = edge.start * self._unit
            rows.append(Row(hold, start, min(hold.reach, num_tokens), hold.dense_from))
            if hold.reach < edge.end * self._unit:
                break
        return rows

    def use(self, path: list[Edge], num_tokens: int, clock: int) -> None:
        """Take note that a prompt's first tokens were looked up."""
        for edge in path:
            hold = edge.holds.get(self) if edge.holds else None
            if hold is None or edge.start * self._unit >= num_tokens:
                return
            self._touch(edge, hold, clock)

    def _touch(self, edge: Edge, hold: Hold, clock: int) -> None:
        if hold.used != clock:
            hold.used = clock
            heapq.heappush(self._uses, (clock, -edge.start, next(self._order), edge))

    def keep(self, path: list[Edge], end: int, kept: Kept, clock: int) -> int:
        """Cache a prompt's first ``end`` tokens; return how many blocks are new.

        Args:
            path: Its edges up to there.
            end: Whole scheduler blocks, in tokens.
            kept: Its tails.
            clock: The time.

        Returns:
            ``(blocks, tail blocks)`` that were not there.
        """
        before = self.rows(path, end)
        reach = before[-1].end if before else 0
        num_full = 0
        for edge in path:
            num_full += self._hold(edge, end, kept.hit_tokens, clock)
        (num_tails,) = self.put(self.rows(path, end), reach, end, [kept])
        if path and num_tails:
            hold = path[-1].holds[self]  # type: ignore[index]
            hold.num_blocks += num_tails
        self.num_blocks += num_full + num_tails
        self._evict()
        return num_tails

    def _hold(self, edge: Edge, end: int, hit_tokens: int, clock: int) -> int:
        start, edge_end = edge.start * self._unit, min(edge.end * self._unit, end)
        if edge.holds is None:
            edge.holds = {}
        hold = edge.holds.get(self)
        if hold is None:
            hold = edge.holds[self] = Hold(start, max(start, hit_tokens))
            self._num_holds += 1
        num_new = 0
        if hold.reach < edge_end:
            num_new = self.shape.full_blocks(hold.reach, edge_end)
            hold.reach = edge_end
        hold.dense_from = min(hold.dense_from, max(start, hit_tokens))
        hold.num_blocks += num_new
        self._touch(edge, hold, clock)
        return num_new

    def _evict(self) -> None:
        while self.num_blocks > self._capacity:
            used, _, _, edge = heapq.heappop(self._uses)
            hold = edge.holds.get(self) if edge.holds else None
            if hold is None or hold.used != used:
                continue
            over = self.num_blocks - self._capacity
            gone = min(hold.num_blocks, over)
            self.num_blocks -= gone
            self.num_evicted += gone
            if hold.num_blocks <= over:
                self._let_go(edge)
                continue
            self._shorten(edge, hold, gone)
            heapq.heappush(self._uses, (used, -edge.start, next(self._order), edge))
        if len(self._uses) > _STALE_SHARE * self._num_holds + 1024:
            self._uses = [use for use in self._uses if self._is_current(use)]
            heapq.heapify(self._uses)

    def _is_current(self, use: tuple[int, int, int, Edge]) -> bool:
        hold = use[3].holds.get(self) if use[3].holds else None
        return hold is not None and hold.used == use[0]

    def _let_go(self, edge: Edge) -> None:
        assert edge.holds is not None
        del edge.holds[self]
        self._num_holds -= 1
        if not self._is_all:
            return
        # What nobody has any more is of no use to anybody.
        while edge.parent is not None and not edge.holds and not edge.children:
            parent = edge.parent
            self._tree.remove(edge)
            edge = parent

    def _shorten(self, edge: Edge, hold: Hold, num_gone: int) -> None:
        """Let the last blocks of an edge go."""
        start = edge.start * self._unit
        left = (hold.reach - start) * (hold.num_blocks - num_gone) // hold.num_blocks
        hold.reach = max(start, (start + left) // self._unit * self._unit)
        hold.num_blocks -= num_gone
        hold.tails, _ = _split_marks(hold.tails, hold.reach)
        hold.lows, _ = _split_marks(hold.lows, hold.reach)
        if hold.covers:
            hold.covers = [
                (low, min(high, hold.reach), who)
                for low, high, who in hold.covers
                if low < hold.reach
            ]

    def _split(self, upper: Edge, lower: Edge) -> None:
        hold = lower.holds.get(self) if lower.holds else None
        if hold is None:
            return
        assert lower.holds is not None
        if upper.holds is None:
            upper.holds = {}
        start, middle = upper.start * self._unit, lower.start * self._unit
        if hold.reach <= middle:
            upper.holds[self] = hold
            del lower.holds[self]
        else:
            share = (middle - start) / (hold.reach - start)
            top = Hold(middle, hold.dense_from, used=hold.used)
            top.num_blocks = round(hold.num_blocks * share)
            hold.num_blocks -= top.num_blocks
            top.tails, hold.tails = _split_marks(hold.tails, middle)
            top.lows, hold.lows = _split_marks(hold.lows, middle)
            covers = hold.covers or []
            top.covers = [(a, min(b, middle), w) for a, b, w in covers if a < middle]
            hold.covers = [(max(a, middle), b, w) for a, b, w in covers if b > middle]
            hold.dense_from = max(hold.dense_from, middle)
            upper.holds[self] = top
            self._num_holds += 1
        use = (hold.used, -upper.start, next(self._order), upper)
        heapq.heappush(self._uses, use)

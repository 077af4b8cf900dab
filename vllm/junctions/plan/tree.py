# SPDX-License-Identifier: Apache-2.0
"""A tree of prompts: each prefix once, however many prompts begin with it.

An edge is a run of units (equal pieces of a prompt) at which nobody parted so far.
Edges carry marks: positions at which caches have something, and which of them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

# Rows of what an edge remembers by position: [position, who, position, who, ...],
# ascending; "who" is a set of caches, one bit each.
Marks = list[int]


class Edge:
    """A run of units between two points where prompts part, or where one ends.

    Attributes:
        ids: What each unit goes by; never the same for two different prefixes.
        start: Units before its first one.
        parent: The edge that it follows; None for the root.
        children: Edges that follow, by their first unit's id.
        tails: Positions in tokens at which caches have all tails, marked on the edge
            on which the blocks that prove them end.
        lows: The same without the proof; only where there is one.
        covers: Stretches that tails cover: [first token, who, ...] up to the edge's
            own end or the position; see :mod:`.overlaps`.
        holds: What bounded caches have of the edge.
        used: When a prompt came by last.
    """

    __slots__ = (
        "children",
        "covers",
        "holds",
        "ids",
        "lows",
        "parent",
        "start",
        "tails",
        "used",
    )

    def __init__(self, ids: np.ndarray, start: int, parent: "Edge | None") -> None:
        self.ids = ids
        self.start = start
        self.parent = parent
        self.children: dict[int, Edge] = {}
        self.tails: Marks | None = None
        self.lows: Marks | None = None
        self.covers: list[tuple[int, int, int]] | None = None
        self.holds: dict[Any, Any] | None = None
        self.used = 0

    @property
    def end(self) -> int:
        """Units up to its end."""
        return self.start + len(self.ids)


def add_mark(marks: Marks | None, position: int, who: int) -> Marks:
    """Return ``marks`` with caches added at a position."""
    if marks is None:
        return [position, who]
    for index in range(len(marks) - 2, -1, -2):
        if marks[index] == position:
            marks[index + 1] |= who
            return marks
        if marks[index] < position:
            marks[index + 2 : index + 2] = (position, who)
            return marks
    marks[:0] = (position, who)
    return marks


def who_has(marks: Marks | None, position: int) -> int:
    """Return which caches are marked at a position."""
    if marks is None:
        return 0
    for index in range(len(marks) - 2, -1, -2):
        if marks[index] == position:
            return marks[index + 1]
    return 0


def _split_marks(marks: Marks | None, position: int) -> tuple[Any, Any]:
    if marks is None:
        return None, None
    index = 0
    while index < len(marks) and marks[index] <= position:
        index += 2
    return marks[:index] or None, marks[index:] or None


class PrefixTree:
    """All prefixes that came by.

    Attributes:
        unit_tokens: Tokens per unit.
        num_units: Units that are kept, of all prompts.
        root: An empty edge.
    """

    def __init__(self, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens
        self.num_units = 0
        self.root = Edge(np.empty(0, dtype=np.uint64), 0, None)
        self._on_split: list[Any] = []

    def on_split(self, listener: Any) -> None:
        """Have ``listener(upper, lower)`` called when an edge becomes two."""
        self._on_split.append(listener)

    def match(self, ids: np.ndarray) -> tuple[list[Edge], int]:
        """Return the edges that a prompt runs along, and how many units it shares."""
        path: list[Edge] = []
        position, edge, num_units = 0, self.root, len(ids)
        while position < num_units:
            child = edge.children.get(int(ids[position]))
            if child is None:
                break
            path.append(child)
            num_both = min(len(child.ids), num_units - position)
            same = child.ids[:num_both] == ids[position : position + num_both]
            # Chained: where one unit is the same, all before it are.
            num_same = num_both if same[-1] else int(np.count_nonzero(same))
            position += num_same
            if num_same < len(child.ids):
                break
            edge = child
        return path, position

    def extend(
        self, ids: np.ndarray, path: list[Edge], num_shared: int, num_units: int
    ) -> list[Edge]:
        """Add a prompt's first ``num_units``; return the edges that they are.

        Args:
            ids: The prompt's units.
            path: What :meth:`match` returned.
            num_shared: Likewise.
            num_units: Units to have in the tree.
        """
        if num_units <= num_shared:
            return [edge for edge in path if edge.start < num_units]
        if path and num_shared < path[-1].end:
            path[-1] = self._split(path[-1], num_shared)
        parent = path[-1] if path else self.root
        edge = Edge(ids[num_shared:num_units].copy(), num_shared, parent)
        parent.children[int(edge.ids[0])] = edge
        self.num_units += len(edge.ids)
        path.append(edge)
        return path

    def _split(self, lower: Edge, position: int) -> Edge:
        """Cut an edge in two; return the new upper one."""
        length = position - lower.start
        upper = Edge(lower.ids[:length], lower.start, lower.parent)
        assert lower.parent is not None
        lower.parent.children[int(upper.ids[0])] = upper
        lower.ids, lower.start, lower.parent = lower.ids[length:], position, upper
        upper.children[int(lower.ids[0])] = lower
        upper.used = lower.used
        tokens = position * self.unit_tokens
        upper.tails, lower.tails = _split_marks(lower.tails, tokens)
        upper.lows, lower.lows = _split_marks(lower.lows, tokens)
        if lower.covers:
            covers = lower.covers
            upper.covers = [
                (low, min(high, tokens), who)
                for low, high, who in covers
                if low < tokens
            ]
            lower.covers = [
                (max(low, tokens), high, who)
                for low, high, who in covers
                if high > tokens
            ]
        for listener in self._on_split:
            listener(upper, lower)
        return upper

    def remove(self, leaf: Edge) -> None:
        """Forget an edge that nothing follows."""
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[int(leaf.ids[0])]
        self.num_units -= len(leaf.ids)
        leaf.parent = None

    def edges(self) -> Iterator[Edge]:
        """Visit all edges, each before those that follow it."""
        waiting = list(self.root.children.values())
        while waiting:
            edge = waiting.pop()
            yield edge
            waiting.extend(edge.children.values())

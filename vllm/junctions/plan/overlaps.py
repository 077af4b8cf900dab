# SPDX-License-Identifier: Apache-2.0
"""Tails that are longer than a scheduler block, and what several of them cover.

A window of 1,024 tokens with hits at every 16: two tails 512 tokens apart make every
position between them usable. Stretches are half open, in tokens.
"""

from collections.abc import Sequence

Cover = tuple[int, int, int]


def covered_up_to(stretches: Sequence[tuple[int, int]], start: int) -> int:
    """Return how far stretches, ascending, go on from ``start`` without a gap.

    ``[(0, 4), (3, 9), (11, 12)]`` go on from 2 to 9, and from 10 to 10.
    """
    end = start
    for low, high in stretches:
        if low > end:
            break
        end = max(end, high)
    return end


def num_uncovered(stretches: Sequence[tuple[int, int]], low: int, high: int) -> int:
    """Return how many tokens of ``low`` to ``high`` no stretch covers."""
    missing, position = 0, low
    for start, end in stretches:
        if start >= high:
            break
        if end > position:
            missing += max(start - position, 0)
            position = end
    return missing + max(high - position, 0)


def add_cover(covers: list[Cover] | None, low: int, high: int, who: int) -> list[Cover]:
    """Return covers with a stretch added for some caches."""
    kept = []
    for start, end, caches in covers or ():
        if caches == who and start <= high and end >= low:
            low, high = min(low, start), max(high, end)
        elif not (caches | who == who and low <= start and end <= high):
            kept.append((start, end, caches))
    return [*kept, (low, high, who)]

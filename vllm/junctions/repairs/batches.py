# SPDX-License-Identifier: Apache-2.0
"""Calls to the store that are cut into smaller ones."""

from collections.abc import Iterator, Sequence


def batches(
    weights: Sequence[int], max_weight: int, max_count: int | None = None
) -> Iterator[slice]:
    """Yield runs of items that together weigh no more than allowed.

    Weights of 3, 3, 1 and a limit of 4 make ``[0:1]`` and ``[1:3]``.

    Args:
        weights: Of the items, in order.
        max_weight: Of a run; an item that weighs more is a run by itself.
        max_count: Items of a run; None for any number.
    """
    first = weight = 0
    for index, one in enumerate(weights):
        is_full = weight + one > max_weight or index - first == max_count
        if index > first and is_full:
            yield slice(first, index)
            first, weight = index, 0
        weight += one
    if weights:
        yield slice(first, len(weights))

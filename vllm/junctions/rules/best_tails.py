# SPDX-License-Identifier: Apache-2.0
"""Which tails bring the most, and what a tail costs: arithmetic over positions."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from vllm.junctions.rules.tails import TailShape


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
def _price_of_lower(num_positions: int, price_tokens: float) -> np.ndarray:
    """Return what a further tail costs: its price below the other, else infinity."""
    is_lower = np.tri(num_positions, k=-1, dtype=bool)
    return np.where(is_lower, price_tokens, np.inf)


def best_tails(
    positions: np.ndarray,
    rates: np.ndarray,
    other_tokens: np.ndarray,
    max_tails: int,
    price_tokens: float,
) -> list[int]:
    """Choose the tails that bring the most hit tokens beyond their price.

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
    value = gained.diagonal() - price_tokens
    if value.max() <= 0:
        return []
    return _with_lower_tails(value, gained, max_tails, price_tokens)


def _with_lower_tails(
    value: np.ndarray, gained: np.ndarray, max_tails: int, price_tokens: float
) -> list[int]:
    """Add lower tails to the best single one while they pay."""
    best = value.max()
    above: list[np.ndarray] = []
    if max_tails > 1:
        # added[b, a]: what the next lower tail at b adds to one at a.
        added = gained.diagonal()[:, None] - gained.T
        added -= _price_of_lower(len(value), price_tokens)
        for _ in range(max_tails - 1):
            totals = value + added
            with_one_more = totals.max(axis=1)
            # Each further tail adds less than the one before: the first that does not
            # pay is the last to try.
            if with_one_more.max() <= best:
                break
            value, best = with_one_more, with_one_more.max()
            above.append(totals.argmax(axis=1))
    indices = [int(value.argmax())]
    for chosen_above in reversed(above):
        indices.append(int(chosen_above[indices[-1]]))
    return indices[::-1]

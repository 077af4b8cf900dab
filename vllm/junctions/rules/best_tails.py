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


@lru_cache(maxsize=64)
def _never_lower(num_positions: int) -> np.ndarray:
    """Return infinity where a row's position is not below a column's, and else 0."""
    return np.where(np.tri(num_positions, k=-1, dtype=bool), 0, np.inf)


@lru_cache(maxsize=64)
def _row_starts(num_positions: int) -> np.ndarray:
    """Return where the rows of a square array begin, once it is flattened."""
    return np.arange(0, num_positions**2, num_positions)


def best_tails(
    positions: np.ndarray,
    num_siblings: np.ndarray,
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
        num_siblings: How many siblings to expect that share up to one of the first
            ``i`` positions: one entry more than positions, the first of them 0.
        other_tokens: Of the tails that exist anyway, the highest up to each position,
            as a float: what those who share up to there hit without a new one.
        max_tails: Most tails to choose, at least 1.
        price_tokens: Hit tokens that a tail has to bring.

    Returns:
        Indices into ``positions``, ascending; empty where no tail pays.
    """
    if not len(positions):
        return []
    gains, gross, lost = _values_of_one(positions, other_tokens, num_siblings)
    gross -= price_tokens
    totals = gross - lost
    best = int(totals.argmax())
    if totals.item(best) <= 0:
        return []
    if max_tails == 1:
        return [best]
    lost_below = _lost_below(gains, num_siblings, lost)
    return _with_lower_tails(best, totals, gross, lost_below, max_tails)


def _values_of_one(
    positions: np.ndarray, other_tokens: np.ndarray, num_siblings: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what a tail at each position brings a sibling, all, and what it does not.

    It brings all as if it served all who share at least as much; but some share up to
    above the next tail that exists anyway, and hit that one.
    """
    gains = positions - other_tokens
    first_served = len(positions) - other_tokens[::-1].searchsorted(positions, "right")
    return gains, gains * num_siblings[1:], gains * num_siblings[first_served]


def _lost_below(
    gains: np.ndarray, num_siblings: np.ndarray, lost: np.ndarray
) -> np.ndarray:
    """Return what a tail does not bring where the next one above is a column's."""
    lost_below = np.maximum(gains[:, None] * num_siblings[1:], lost[:, None])
    lost_below += _never_lower(len(gains))
    return lost_below


def _with_lower_tails(
    lowest: int,
    totals: np.ndarray,
    gross: np.ndarray,
    lost_below: np.ndarray,
    max_tails: int,
) -> list[int]:
    """Add lower tails to the best single one, ``lowest``, while they pay.

    ``totals`` begins as what one tail at each position brings, and goes on as what
    the best tails bring whose lowest is there.
    """
    row_starts = _row_starts(len(totals))
    above: list[np.ndarray] = []
    for _ in range(max_tails - 1):
        with_one_more = totals - lost_below
        chosen_above = with_one_more.argmax(axis=1)
        with_one_more = with_one_more.take(row_starts + chosen_above) + gross
        new_lowest = int(with_one_more.argmax())
        # Each further tail adds less than the one before: the first that does not
        # pay is the last to try.
        if with_one_more.item(new_lowest) <= totals.item(lowest):
            break
        totals, lowest = with_one_more, new_lowest
        above.append(chosen_above)
    indices = [lowest]
    for chosen_above in reversed(above):
        indices.append(chosen_above.item(indices[-1]))
    return indices[::-1]

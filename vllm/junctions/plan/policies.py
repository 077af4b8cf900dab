# SPDX-License-Identifier: Apache-2.0
"""Retention policies that a replay compares."""

from collections.abc import Sequence
from dataclasses import dataclass

CEILING = "ceiling"
DENSE = "dense"
STOCK = "stock"
JUNCTIONS = "junctions"


@dataclass(frozen=True)
class Policy:
    """Which tails are kept, and so where prompts can resume.

    Attributes:
        name: As reports and pictures name it.
        summary: What it does, in a few words.
        retention_interval: As vLLM's ``prefix_cache_retention_interval``.
        junctions: Whether the store finds and keeps junctions.
        predicted_tails: Most tails that a prompt gets where a first sibling is
            expected to part; with junctions only.
        full_attention_only: Whether only full-attention groups exist: nothing but
            the shared prefix itself limits a hit then.
    """

    name: str
    summary: str
    retention_interval: int | None = 0
    junctions: bool = False
    predicted_tails: int = 0
    full_attention_only: bool = False


def policies(
    intervals: Sequence[int],
    scheduler_block_tokens: int,
    predicted: Sequence[int] = (),
) -> list[Policy]:
    """Return all policies, those that others are measured against first.

    Args:
        intervals: Fixed retention intervals to try, in tokens.
        scheduler_block_tokens: What an interval has to be a multiple of.
        predicted: Numbers of predicted tails to try.

    Raises:
        ValueError: An interval is not.
    """
    for interval in intervals:
        if interval <= 0 or interval % scheduler_block_tokens:
            raise ValueError(
                f"A retention interval of {interval} tokens is no positive multiple "
                f"of the scheduler block, {scheduler_block_tokens} tokens."
            )
    every = sorted(set(intervals))
    return [
        Policy(CEILING, "full attention alone", full_attention_only=True),
        Policy(DENSE, "tails at every scheduler block", retention_interval=None),
        Policy(STOCK, "tails where the same prompt could resume"),
        Policy(JUNCTIONS, "stock's, and those where prompts part", junctions=True),
        *(_every(interval, junctions=False) for interval in every),
        *(_every(interval, junctions=True) for interval in every),
        *(
            Policy(
                f"{JUNCTIONS}+predict-{num_tails}",
                f"junctions', and up to {num_tails} where a first sibling may part",
                junctions=True,
                predicted_tails=num_tails,
            )
            for num_tails in predicted
        ),
    ]


def _every(interval: int, junctions: bool) -> Policy:
    return Policy(
        f"{JUNCTIONS}+every-{interval}" if junctions else f"every-{interval}",
        f"{'junctions' if junctions else 'stock'}'s, and those at every {interval} "
        "tokens",
        retention_interval=interval,
        junctions=junctions,
    )

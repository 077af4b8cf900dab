# SPDX-License-Identifier: Apache-2.0
"""Counts what becomes of marks, and logs the first of a kind that is ignored."""

from vllm.junctions.metrics.counted import MARKS
from vllm.junctions.metrics.front_end import FRONT_END
from vllm.junctions.metrics.marks import MarkOutcome


def count(outcome: MarkOutcome, detail: str = "") -> None:
    """Count one mark.

    Args:
        outcome: What became of it.
        detail: Goes on after the outcome's meaning in the log.
    """
    if outcome is MarkOutcome.TAKEN:
        FRONT_END.add(MARKS, 1, outcome.value)
        return
    FRONT_END.add_once_told(
        MARKS,
        outcome.value,
        f"Ignored a mark on a chat message: {outcome.meaning}{detail}.",
    )

# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.junctions.metrics.report import LookupOutcome, LookupReport


@pytest.mark.parametrize(
    ("report", "outcome"),
    [
        (LookupReport(5000, 3840, 3840), LookupOutcome.HIT),
        (LookupReport(5000, 3584, 3840, (3840,)), LookupOutcome.HIT),
        (LookupReport(5000, 0, 3840, (3584, 3840)), LookupOutcome.TAIL_MISSING),
        (LookupReport(5000), LookupOutcome.NOTHING_STORED),
        (LookupReport(200, is_too_short=True), LookupOutcome.TOO_SHORT),
        (LookupReport(5000, error="boom"), LookupOutcome.ERROR),
    ],
)
def test_outcome(report: LookupReport, outcome: LookupOutcome) -> None:
    assert report.outcome is outcome


def test_lost_tokens() -> None:
    assert LookupReport(5000, 3584, 3840).lost_tokens == 256
    assert LookupReport(5000, 3840, 3584).lost_tokens == 0

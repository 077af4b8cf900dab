# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.junctions import metrics
from vllm.junctions.metrics import JunctionCounters


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(
        metrics.logger, "warning", lambda text, *args: seen.append(text % args)
    )
    return seen


def test_a_fault_is_logged_once_and_counted_each_time(warnings):
    counters = JunctionCounters()
    counters.add_fault("dropped_entries", "Dropped something.", 2)
    counters.add_fault("dropped_entries", "Dropped something.", 3)
    assert counters.as_dict()["dropped_entries"] == 5
    assert warnings == [
        "Dropped something. Further cases are only counted (dropped_entries)."
    ]


def test_each_kind_of_fault_is_logged_for_itself(warnings):
    counters = JunctionCounters()
    counters.add_fault("dropped_entries", "A.")
    counters.add_fault("malformed_payloads", "B.")
    assert len(warnings) == 2

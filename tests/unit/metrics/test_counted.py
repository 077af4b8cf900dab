# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm.junctions.metrics import counted as metrics
from vllm.junctions.metrics.counted import (
    FAULTS,
    FOUND,
    LOOKUP_KEYS,
    LOOKUP_RPCS,
    LOOKUPS,
    LOST_TOKENS,
    METRICS,
    TAIL_BYTES,
    JunctionCounters,
)
from vllm.junctions.metrics.lookup_report import LookupReport

_NAMES = {0: "0-FullAttention-32", 1: "1-SlidingWindow-32"}


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(
        metrics.logger, "warning", lambda text, *args: seen.append(text % args)
    )
    return seen


def _taken(counters: JunctionCounters) -> dict[tuple[str, ...], list[float]]:
    values: dict[tuple[str, ...], list[float]] = {}
    for record in counters.take():
        key = (record["name"], *record["labels"])
        values.setdefault(key, []).append(record["value"])
    return values


def test_every_kind_of_fault_is_exported(warnings):
    counters = JunctionCounters()
    for name in counters.as_dict():
        counters.add_fault(name, "Oh.", 2)
    assert _taken(counters) == {(FAULTS.name, name): [2] for name in counters.as_dict()}
    assert {(name,) for name in counters.as_dict()} == set(FAULTS.known_values)


def test_what_was_taken_is_not_reported_again(warnings):
    counters = JunctionCounters()
    counters.add(FOUND, 2, "store")
    counters.add(FOUND, 1, "store")
    counters.observe(LOOKUP_KEYS, 7)
    counters.add_fault("dropped_entries", "A.", 4)
    assert len(_taken(counters)) == 3
    assert counters.take() == []
    counters.add(FOUND, 1, "local")
    assert _taken(counters) == {(FOUND.name, "local"): [1]}
    assert counters.as_dict()["dropped_entries"] == 4


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (
            LookupReport(5000, 3584, 3840, (3840,), 1, num_keys=90, num_rpcs=2),
            {
                (LOOKUPS.name, "hit"): [1],
                (LOST_TOKENS.name, "1-SlidingWindow-32"): [256],
                (LOOKUP_KEYS.name,): [90],
                (LOOKUP_RPCS.name,): [2],
            },
        ),
        (
            LookupReport(5000, 3840, 3840),
            {(LOOKUPS.name, "hit"): [1], (LOST_TOKENS.name, "none"): [0]},
        ),
        # A tail above what full attention has.
        (
            LookupReport(5000, 3840, 3584),
            {(LOOKUPS.name, "hit"): [1], (LOST_TOKENS.name, "none"): [0]},
        ),
        (
            LookupReport(5000, 0, 3840, (3584, 3840)),
            {
                (LOOKUPS.name, "tail_missing"): [1],
                (LOST_TOKENS.name, "unknown"): [3840],
            },
        ),
        (LookupReport(5000), {(LOOKUPS.name, "nothing_stored"): [1]}),
        (LookupReport(5000, error="gone"), {(LOOKUPS.name, "error"): [1]}),
        (LookupReport(20, is_too_short=True), {(LOOKUPS.name, "too_short"): [1]}),
    ],
)
def test_a_lookup_is_counted_with_all_that_is_known(report, expected):
    counters = JunctionCounters()
    counters.add_report(report, _NAMES)
    assert _taken(counters) == expected


def test_threads_lose_no_count(warnings):
    counters = JunctionCounters()
    taken: list[float] = []

    def count(_: int) -> None:
        counters.add(TAIL_BYTES, 3)
        counters.add_fault("dropped_entries", "A.")
        taken.extend(sum(_taken(counters).get((TAIL_BYTES.name,), [])) for _ in "a")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(2000)))
    assert sum(taken) == 6000
    assert counters.dropped_entries == 2000


def test_metric_names_follow_the_rules_of_prometheus_and_of_vllm():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        # vLLM clears metrics with this prefix before it registers them anew.
        assert metric.name.startswith("vllm:junctions_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        # Ray refuses buckets at 0.
        assert all(bound > 0 for bound in metric.buckets)
        assert bool(metric.buckets) == (metric.kind == "histogram")
        for values in metric.known_values:
            assert len(values) == len(metric.labels)

# SPDX-License-Identifier: Apache-2.0
"""What is measured, and the counters that collect it until the next report.

Each connector role and rank counts for itself. vLLM asks a role for its statistics
after every step (see ``stats.py``); what a role has counted since then goes with them
to the process that serves ``/metrics``.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.logger import init_logger

from vllm.junctions.metrics.lookup_report import LookupOutcome, LookupReport
from vllm.junctions.metrics.marks import MarkOutcome
from vllm.junctions.metrics.metric import Metric
from vllm.junctions.rules.declared import Flaw

logger = init_logger(__name__)

# One observation or increment on its way to ``/metrics``:
# ``{"name": str, "labels": [str, ...], "value": number}``.
Record = dict[str, Any]

NO_GROUP = "none"
UNKNOWN_GROUP = "unknown"
# What names a junction that no lookup has found yet.
DECLARED, PREDICTED = "declared", "predicted"
EXTRA_SOURCES = {DECLARED, PREDICTED}


LOOKUPS = Metric(
    "vllm:junctions_lookups_total",
    "counter",
    "Store lookups, by outcome.",
    ("outcome",),
    tuple((outcome.value,) for outcome in LookupOutcome),
)
FOUND = Metric(
    "vllm:junctions_found_total",
    "counter",
    "Junctions of scheduled requests, by what named them: the lookup that found "
    "them, the client that declared or the prediction that placed them.",
    ("source",),
    (("store",), ("local",), (DECLARED,), (PREDICTED,)),
)
DECLARED_IGNORED = Metric(
    "vllm:junctions_declared_ignored_total",
    "counter",
    "Positions that clients declared and that were ignored, by reason.",
    ("reason",),
    tuple((flaw.value,) for flaw in Flaw),
)
MARKS = Metric(
    "vllm:junctions_marks_total",
    "counter",
    "Marks on chat messages, by what became of them: taken if a position was found, "
    "otherwise why not.",
    ("outcome",),
    tuple((outcome.value,) for outcome in MarkOutcome),
)
FIRST_SIBLINGS = Metric(
    "vllm:junctions_first_siblings_total",
    "counter",
    "Requests that were the first to hit a tail that this instance was told to keep or "
    "had predicted, by which of the two.",
    ("source",),
    ((DECLARED,), (PREDICTED,)),
)
FIRST_SIBLING_TOKENS = Metric(
    "vllm:junctions_first_sibling_tokens_total",
    "counter",
    "Tokens that such requests would have computed without that tail.",
    ("source",),
    ((DECLARED,), (PREDICTED,)),
)
LOST_TOKENS = Metric(
    "vllm:junctions_lost_tokens",
    "histogram",
    "Tokens that some group has in the store and the joint hit does not reach, per "
    "lookup that found anything; by the group that lags.",
    ("group",),
    ((NO_GROUP,),),
    tuple(float(1 << exponent) for exponent in (0, *range(6, 21))),
)
LOOKUP_KEYS = Metric(
    "vllm:junctions_lookup_keys",
    "histogram",
    "Keys whose existence a lookup asked for.",
    known_values=((),),
    buckets=(1, 3, 10, 30, 100, 300, 1e3, 3e3, 1e4, 3e4, 1e5),
)
LOOKUP_RPCS = Metric(
    "vllm:junctions_lookup_rpcs",
    "histogram",
    "Calls to the store that a lookup made.",
    known_values=((),),
    buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
)
TAIL_BLOCKS = Metric(
    "vllm:junctions_tail_blocks_saved_total",
    "counter",
    "Blocks put into the store only because they are a junction's tail or state.",
    known_values=((),),
)
TAIL_BYTES = Metric(
    "vllm:junctions_tail_bytes_saved_total",
    "counter",
    "Bytes put into the store only because they are a junction's tail or state.",
    known_values=((),),
)
EXTRA_BYTES = Metric(
    "vllm:junctions_extra_tail_bytes_saved_total",
    "counter",
    "Bytes of those that were put for a declared or a predicted junction alone.",
    ("source",),
    ((DECLARED,), (PREDICTED,)),
)
TAILS_SKIPPED = Metric(
    "vllm:junctions_tail_blocks_skipped_total",
    "counter",
    "Blocks of junction tails that were gone when their save was due.",
    known_values=((),),
)
INFO = Metric(
    "vllm:junctions_info",
    "gauge",
    "1; the labels say what instances must agree on to share hits. Appears with the "
    "first request.",
    ("version", "block_tokens", "hash_tokens", "hash_root"),
)


@dataclass
class JunctionCounters:
    """Faults since the engine started, and what is yet to be reported.

    One object per connector role. Every integer field is a kind of fault, and is
    exported as such (``vllm:junctions_faults_total``).

    Attributes:
        dropped_entries: Junction entries that were 0 or past the request.
        malformed_payloads: Lookup answers that could not be used; each cost a hit.
        failed_lookups: Lookups that raised on the worker; each cost a hit.
        timed_out_lookups: Lookups that were not answered in time, or not sent behind
            one that was not; each cost a hit.
        failed_loads: Loads of a hit that the store did not deliver.
        set_aside_loads: Loads that failed so late that something may still arrive.
        refused_loads: Loads that were not tried, for want of memory to land in.
    """

    dropped_entries: int = 0
    malformed_payloads: int = 0
    failed_lookups: int = 0
    timed_out_lookups: int = 0
    failed_loads: int = 0
    set_aside_loads: int = 0
    refused_loads: int = 0
    _lock: threading.Lock = field(
        default_factory=threading.Lock, repr=False, compare=False
    )
    _sums: dict[tuple[str, tuple[str, ...]], float] = field(
        default_factory=dict, repr=False, compare=False
    )
    _observations: list[Record] = field(default_factory=list, repr=False, compare=False)
    _told: set[tuple[str, str]] = field(default_factory=set, repr=False, compare=False)

    def add(self, metric: Metric, value: float = 1, *labels: str) -> None:
        """Raise a counter.

        Args:
            metric: A metric of this module.
            value: By how much.
            labels: Values of the metric's labels, in their order.
        """
        key = (metric.name, labels)
        with self._lock:
            self._sums[key] = self._sums.get(key, 0) + value

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Note one value of a histogram, or set a gauge; arguments as for ``add``."""
        record = {"name": metric.name, "labels": list(labels), "value": value}
        with self._lock:
            self._observations.append(record)

    def add_lookup(self, outcome: LookupOutcome) -> None:
        """Count a lookup by its outcome."""
        self.add(LOOKUPS, 1, outcome.value)

    def add_report(self, report: LookupReport, group_names: Mapping[int, str]) -> None:
        """Count a finished lookup with all that is known about it.

        Args:
            report: The lookup.
            group_names: Label by group id.
        """
        self.add_lookup(report.outcome)
        if report.num_rpcs:
            self.observe(LOOKUP_KEYS, report.num_keys)
            self.observe(LOOKUP_RPCS, report.num_rpcs)
        if not report.longest_hit_length:
            return
        group = NO_GROUP
        if report.lost_tokens:
            lagging = report.lagging_group
            group = UNKNOWN_GROUP if lagging is None else group_names[lagging]
        self.observe(LOST_TOKENS, report.lost_tokens, group)

    def add_fault(self, name: str, message: str, count: int = 1) -> None:
        """Count a fault and log it the first time it happens.

        Args:
            name: The counter to raise, one of this class's fields.
            message: What happened, in words an operator can act on.
            count: How many to add.
        """
        with self._lock:
            setattr(self, name, getattr(self, name) + count)
        self.add_once_told(FAULTS, name, message, count)

    def add_once_told(
        self, metric: Metric, label: str, message: str, count: int = 1
    ) -> None:
        """Raise a counter of one label, and log the first case of each label.

        Args:
            metric: A metric of this module.
            label: The value of its label.
            message: What happened, in words an operator can act on.
            count: By how much.
        """
        self.add(metric, count, label)
        with self._lock:
            is_first = (metric.name, label) not in self._told
            self._told.add((metric.name, label))
        if is_first:
            logger.warning("%s Further cases are only counted (%s).", message, label)

    def as_dict(self) -> dict[str, int]:
        """Return the faults by name."""
        return {name: getattr(self, name) for name in fault_names()}

    def take(self) -> list[Record]:
        """Return everything counted since the last call."""
        with self._lock:
            sums, self._sums = self._sums, {}
            observations, self._observations = self._observations, []
        return [
            {"name": name, "labels": list(labels), "value": value}
            for (name, labels), value in sums.items()
        ] + observations


def fault_names() -> tuple[str, ...]:
    """Return the kinds of fault that are counted."""
    return tuple(f.name for f in fields(JunctionCounters) if f.name[0] != "_")


FAULTS = Metric(
    "vllm:junctions_faults_total",
    "counter",
    "Things that went wrong and cost no more than hits, by kind.",
    ("kind",),
    tuple((name,) for name in fault_names()),
)

METRICS = (
    LOOKUPS,
    FOUND,
    FIRST_SIBLINGS,
    FIRST_SIBLING_TOKENS,
    DECLARED_IGNORED,
    MARKS,
    LOST_TOKENS,
    TAIL_BLOCKS,
    TAIL_BYTES,
    EXTRA_BYTES,
    TAILS_SKIPPED,
    LOOKUP_KEYS,
    LOOKUP_RPCS,
    FAULTS,
    INFO,
)

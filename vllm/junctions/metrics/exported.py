# SPDX-License-Identifier: Apache-2.0
"""How counters reach ``/metrics``: vLLM's connector statistics, with ours added.

``data`` stays what the stock class makes it, records by operation, plus one key of
ours whose value is a list of records too. So the stock code adds ranks and intervals
up, and takes the statistics from process to process, without knowing the key.
"""

from collections import defaultdict
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
    MooncakeStorePromMetrics,
)

from vllm import envs
from vllm.junctions.metrics.counted import METRICS, JunctionCounters, Record
from vllm.junctions.metrics.front_end import FRONT_END
from vllm.junctions.metrics.metric import Metric

KEY = "junctions"


class JunctionConnectorStats(MooncakeStoreConnectorStats):
    """The stock statistics, with records of this package under :data:`KEY`."""

    @classmethod
    def of(
        cls, stats: KVConnectorStats | None, counters: JunctionCounters
    ) -> "JunctionConnectorStats | None":
        """Return ``stats`` plus what ``counters`` hold; None if that is nothing.

        Takes from the counters what it returns. The result is of this class
        whether or not there is anything of ours in it: vLLM adds up statistics of
        one class only.

        Args:
            stats: What the stock side reports, None for nothing.
            counters: The counters of the same side.
        """
        data = dict(stats.data) if stats is not None else {}
        records = counters.take()
        # vLLM's Rust front-end decodes the operations of the stock class and
        # discards a report that has anything else in it.
        if records and not envs.VLLM_USE_RUST_FRONTEND:
            data[KEY] = records
        return cls(data=data) if data else None

    def reduce(self) -> dict[str, int | float]:
        """Return the stock figures for the log line, and ours after them.

        Counters appear as sums, histograms as averages.

        Source: extends ``MooncakeStoreConnectorStats.reduce``.
        """
        stock, ours = _split(self.data)
        values: dict[str, list[float]] = defaultdict(list)
        for record in ours:
            metric = _BY_NAME[record["name"]]
            if metric.kind != "gauge":
                values[_log_name(metric, record["labels"])].append(record["value"])
        reduced = MooncakeStoreConnectorStats(data=stock).reduce()
        for name, found in sorted(values.items()):
            total = sum(found)
            reduced[name] = round(total / len(found), 1) if "_avg" in name else total
        return reduced


class JunctionPromMetrics(MooncakeStorePromMetrics):
    """The stock Prometheus metrics, and this package's under the same labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            metric.name: _create(metric, metric_types, labelnames) for metric in METRICS
        }
        self._children: dict[tuple[Any, ...], Any] = {}
        # A counter that is there from the start can be told from one that is not
        # exported, and its first increment has something to be a rate of.
        for metric in METRICS:
            for values in metric.known_values:
                for engine_idx in per_engine_labelvalues:
                    self._child(engine_idx, metric.name, values)

    def observe(
        self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0
    ) -> None:
        """Record an engine's statistics, and what this process counted meanwhile.

        Source: extends ``MooncakeStorePromMetrics.observe``.
        """
        if not transfer_stats_data:
            return
        stock, ours = _split(transfer_stats_data)
        super().observe(stock, engine_idx)
        for record in (*ours, *FRONT_END.take()):
            name, value = record["name"], record["value"]
            child = self._child(engine_idx, name, tuple(record["labels"]))
            kind = _BY_NAME[name].kind
            if kind == "counter":
                child.inc(value)
            elif kind == "histogram":
                child.observe(value)
            else:
                child.set(value)

    def _child(self, engine_idx: int, name: str, values: tuple[str, ...]) -> Any:
        key = (engine_idx, name, values)
        if key not in self._children:
            labels = (*self.per_engine_labelvalues[engine_idx], *values)
            self._children[key] = self._metrics[name].labels(*labels)
        return self._children[key]


_BY_NAME = {metric.name: metric for metric in METRICS}


def _split(data: dict[str, Any]) -> tuple[dict[str, Any], list[Record]]:
    stock = {name: records for name, records in data.items() if name != KEY}
    return stock, data.get(KEY, [])


def _log_name(metric: Metric, labels: list[str]) -> str:
    name = metric.name.removeprefix("vllm:").removesuffix("_total")
    if metric.kind == "histogram":
        return f"{name}_avg"
    return "_".join((name, *labels))


def _create(metric: Metric, metric_types: dict[Any, Any], labelnames: list[str]) -> Any:
    arguments: dict[str, Any] = {
        "name": metric.name,
        "documentation": metric.meaning,
        "labelnames": [*labelnames, *metric.labels],
    }
    if metric.kind == "counter":
        return metric_types[Counter](**arguments)
    if metric.kind == "histogram":
        return metric_types[Histogram](**arguments, buckets=list(metric.buckets))
    # Of several API servers only one sees a given report.
    return metric_types[Gauge](**arguments, multiprocess_mode="mostrecent")

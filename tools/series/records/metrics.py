# SPDX-License-Identifier: Apache-2.0
"""The last commit, droppable: how many junctions requests learned of, by source."""

from tools.series.edits import Commit, Edit

_STORE = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store"
_CONNECTOR = f"{_STORE}/connector.py"
_METRICS = f"{_STORE}/metrics.py"
_SCHEDULER = f"{_STORE}/scheduler.py"
_UNIT = "tests/v1/kv_connector/unit"

_IMPORT = """\
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
)
"""

_METRICS_EDITS = (
    Edit(
        _METRICS,
        at="    PromMetricT,\n)\n",
        put="""\
    PromMetricT,
)

# Beside the operations: junctions that requests learned of, by source.
JUNCTIONS_FOUND = "junctions_found"
""",
    ),
    Edit(
        _METRICS,
        at="if not records:",
        until="continue\n",
        put="""\
if not records:
                continue
            if operation == JUNCTIONS_FOUND:
                for record in records:
                    key = f"{operation}_{record['source']}"
                    reduced[key] = reduced.get(key, 0) + int(record["num_found"])
                continue
""",
    ),
    Edit(
        _METRICS,
        at="    def record_operation(",
        how="before",
        put="""\
    def record_junctions(self, source: str, num_found: int) -> None:
        if num_found:
            self.data.setdefault(JUNCTIONS_FOUND, []).append(
                {"source": source, "num_found": num_found}
            )

""",
    ),
    Edit(
        _METRICS,
        at="self._counter_failed_keys = ",
        how="before",
        put="""\
        self._counter_junctions = self._counter_cls(
            name="vllm:mooncake_store_junctions_found_total",
            documentation="Number of shared-prefix junctions that requests learned of.",
            labelnames=labelnames + ["source"],
        )
""",
    ),
    Edit(
        _METRICS,
        at="assert isinstance(record, dict)",
        how="after",
        put="""\
                if operation == JUNCTIONS_FOUND:
                    labels = self.per_engine_labelvalues[engine_idx]
                    self._counter_junctions.labels(*labels, record["source"]).inc(
                        int(record["num_found"])
                    )
                    continue
""",
    ),
)

_SCHEDULER_EDITS = (
    Edit(
        _SCHEDULER,
        at="from vllm.config import VllmConfig",
        how="before",
        put="import vllm.envs as envs\n",
    ),
    Edit(
        _SCHEDULER,
        at="store.worker import (",
        how="before",
        put=_IMPORT,
    ),
    Edit(
        _SCHEDULER,
        at="self._junctions: dict",
        how="after",
        put="        self._stats = MooncakeStoreConnectorStats()\n",
    ),
    Edit(
        _SCHEDULER,
        at="known = {*self._junctions.get",
        how="before",
        put="            self._count_junctions(request)\n",
    ),
    Edit(
        _SCHEDULER,
        at="    def build_connector_meta(",
        how="before",
        put='''\
    def _count_junctions(self, request: Request) -> None:
        # The Rust front-end discards a report with anything but operations in it.
        if envs.VLLM_USE_RUST_FRONTEND:
            return
        # Called twice for a request that loads: count what is new.
        known = self._junctions.get(request.request_id, ())
        for source, positions in (
            ("local", request.local_prefix_boundaries),
            ("external", request.external_prefix_boundaries),
        ):
            num_found = sum(position not in known for position in positions)
            self._stats.record_junctions(source, num_found)

    def get_kv_connector_stats(self) -> MooncakeStoreConnectorStats | None:
        """Return what this side has counted since the last call, if anything."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, MooncakeStoreConnectorStats()
        return stats

''',
    ),
)

COMMIT = Commit(
    name="metrics",
    message="""\
[KVConnector][Metrics] Mooncake store: count shared-prefix junctions

A prompt that parts from a stored one leaves no trace in the metrics: its sibling
only hits later. Count the junctions that scheduled requests learned of, by where
from (the local cache, or the store's lookup):
vllm:mooncake_store_junctions_found_total{source}, and in the periodic log line.
The Rust front-end decodes the present operations only, so nothing is reported to it.
""",
    edits=(
        *_METRICS_EDITS,
        *_SCHEDULER_EDITS,
        Edit(
            _CONNECTOR,
            at="if self.connector_worker is None:",
            within="def get_kv_connector_stats(",
            until="return None\n",
            put="""\
if self.connector_worker is None:
            assert self.connector_scheduler is not None
            return self.connector_scheduler.get_kv_connector_stats()
""",
        ),
        Edit(
            f"{_UNIT}/test_mooncake_store_scheduler.py",
            at="store.scheduler import (",
            how="before",
            put=_IMPORT,
        ),
        Edit(
            f"{_UNIT}/test_mooncake_store_scheduler.py",
            at="    scheduler._junctions = {}\n",
            how="after",
            put="    scheduler._stats = MooncakeStoreConnectorStats()\n",
        ),
    ),
    new_files=(f"{_UNIT}/test_mooncake_store_junction_metrics.py",),
)

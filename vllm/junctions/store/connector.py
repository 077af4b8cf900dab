# SPDX-License-Identifier: Apache-2.0
"""``MooncakeStoreConnector`` with shared-prefix junctions.

The class keeps the stock name: vLLM finds a connector's metrics by it, and a serve
command selects it by it.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
    connector as stock,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm.junctions.config import JunctionsConfig
from vllm.junctions.metrics.exported import JunctionConnectorStats, JunctionPromMetrics
from vllm.junctions.seams import compat
from vllm.junctions.seams.substitute import substituted
from vllm.junctions.store.scheduler import JunctionStoreScheduler
from vllm.junctions.store.worker import JunctionStoreWorker


class MooncakeStoreConnector(stock.MooncakeStoreConnector):
    """The stock connector, whose store lookups return shared-prefix junctions."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        with substituted(
            compat.STORE_CONNECTOR,
            MooncakeStoreScheduler=JunctionStoreScheduler,
            MooncakeStoreWorker=JunctionStoreWorker,
        ):
            super().__init__(vllm_config, role, kv_cache_config)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this role has counted since the last call.

        Source: extends ``MooncakeStoreConnector.get_kv_connector_stats``, whose
        scheduler role reports nothing.
        """
        if isinstance(self.connector_scheduler, JunctionStoreScheduler):
            return self.connector_scheduler.get_kv_connector_stats()
        return super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return statistics around ``data``, from this process or another."""
        return JunctionConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return what records the statistics in Prometheus: stock's if off."""
        if not JunctionsConfig.of(vllm_config).junctions:
            return super().build_prom_metrics(
                vllm_config, metric_types, labelnames, per_engine_labelvalues
            )
        return JunctionPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

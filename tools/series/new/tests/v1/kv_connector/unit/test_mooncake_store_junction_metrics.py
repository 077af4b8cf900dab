# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Junctions that requests learned of reach the log line and Prometheus."""

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from tests.v1.kv_connector.unit.test_mooncake_store_scheduler import (
    _make_bare_scheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

pytestmark = pytest.mark.cpu_test


def _alloc(scheduler, local=(), external=()) -> None:
    request = SimpleNamespace(
        request_id="r",
        local_prefix_boundaries=local,
        external_prefix_boundaries=external,
        shared_prefix_boundaries=(*local, *external),
    )
    scheduler.update_state_after_alloc(request, KVCacheBlocks(([],)), 0)


def _reduced(scheduler) -> dict[str, int | float]:
    """What this interval's log line says."""
    stats = scheduler.get_kv_connector_stats()
    return {} if stats is None else stats.reduce()


def test_junctions_are_counted_by_source():
    scheduler = _make_bare_scheduler()

    _alloc(scheduler, local=(96,), external=(160, 192))

    assert _reduced(scheduler) == {
        "junctions_found_external": 2,
        "junctions_found_local": 1,
    }
    assert scheduler.get_kv_connector_stats() is None


def test_a_request_without_junctions_counts_nothing():
    scheduler = _make_bare_scheduler()

    _alloc(scheduler)

    assert scheduler.get_kv_connector_stats() is None


def test_a_request_that_loads_counts_once():
    """Its second call, when the load is done, brings what is new alone."""
    scheduler = _make_bare_scheduler()

    _alloc(scheduler, external=(160,))
    _alloc(scheduler, local=(192,), external=(160,))

    assert _reduced(scheduler) == {
        "junctions_found_external": 1,
        "junctions_found_local": 1,
    }


def test_the_rust_front_end_gets_operations_only(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    scheduler = _make_bare_scheduler()

    _alloc(scheduler, external=(160,))

    assert scheduler.get_kv_connector_stats() is None


def test_the_connector_asks_its_own_side():
    connector = object.__new__(MooncakeStoreConnector)
    connector.connector_worker = None
    connector.connector_scheduler = _make_bare_scheduler()
    _alloc(connector.connector_scheduler, external=(160,))

    assert connector.get_kv_connector_stats().reduce() == {
        "junctions_found_external": 1
    }


def test_both_sides_reach_the_log_line_and_prometheus():
    unregister_vllm_metrics()
    stats = MooncakeStoreConnectorStats()
    stats.record_operation("save_put", 0.01, num_keys=3)
    for num_found in (1, 2):
        stats.record_junctions("external", num_found)
    metrics = MooncakeStoreConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
        ["engine"],
        {0: ["0"], 1: ["1"]},
    )

    metrics.observe(stats.to_dict(), engine_idx=1)

    def sample(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"engine": "1", **labels})

    found = "vllm:mooncake_store_junctions_found_total"
    keys = "vllm:mooncake_store_operation_keys_total"
    assert stats.reduce()["junctions_found_external"] == 3
    assert sample(found, source="external") == 3
    assert sample(found, source="local") is None
    assert sample(keys, operation="save_put", status="ok") == 3

# SPDX-License-Identifier: Apache-2.0
"""From counters to /metrics, through vLLM's own classes."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
    MooncakeStorePromMetrics,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm.junctions.metrics.counted import METRICS, TAIL_BYTES, JunctionCounters
from vllm.junctions.metrics.exported import (
    KEY,
    JunctionConnectorStats,
    JunctionPromMetrics,
)
from vllm.junctions.metrics.lookup_report import LookupReport
from vllm.junctions.overlay import plugin
from vllm.junctions.store.connector import MooncakeStoreConnector

_TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
_LABELS = ["model_name", "engine"]
_ENGINES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}


def _stock_stats() -> MooncakeStoreConnectorStats:
    stats = MooncakeStoreConnectorStats()
    stats.record_operation("lookup_exists", 0.02, 90)
    stats.record_operation("save_put", 0.3, 12, num_bytes=4096, num_failed_keys=1)
    return stats


def _counters(tail_bytes: int = 100) -> JunctionCounters:
    counters = JunctionCounters()
    counters.add(TAIL_BYTES, tail_bytes)
    counters.add_report(LookupReport(5000, 0, 3840, (3840,)), {})
    return counters


def _config(extra=None) -> SimpleNamespace:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="MooncakeStoreConnector",
            kv_connector_extra_config=extra or {},
        )
    )


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def _samples(registry: CollectorRegistry = REGISTRY) -> dict[tuple, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("vllm:") and not sample.name.endswith("_created")
    }


def _value(name: str, engine: int = 0, **labels: str) -> float | None:
    labels = {"model_name": "m", "engine": str(engine), **labels}
    return REGISTRY.get_sample_value(name, labels)


def test_counters_reach_prometheus_under_vllms_labels():
    prom = MooncakeStoreConnector.build_prom_metrics(
        _config(), _TYPES, _LABELS, _ENGINES
    )
    stats = JunctionConnectorStats.of(_stock_stats(), _counters())
    prom.observe(stats.data, 1)
    assert _value("vllm:junctions_tail_bytes_saved_total", 1) == 100
    assert _value("vllm:junctions_lookups_total", 1, outcome="tail_missing") == 1
    assert _value("vllm:junctions_lost_tokens_sum", 1, group="unknown") == 3840
    # The other engine counted nothing, and shows it.
    assert _value("vllm:junctions_tail_bytes_saved_total", 0) == 0
    assert _value("vllm:junctions_lookups_total", 0, outcome="error") == 0
    # Stock's are there too.
    labels = {"operation": "save_put", "status": "ok"}
    assert _value("vllm:mooncake_store_operation_bytes_total", 1, **labels) == 4096


def test_every_metric_is_there_before_anything_happened():
    JunctionPromMetrics(_config(), _TYPES, _LABELS, _ENGINES)
    shown = {name.removesuffix("_bucket") for name, *_ in _samples()}
    expected = {m.name for m in METRICS if m.kind != "gauge"}
    assert expected <= shown


def test_stocks_own_metrics_and_log_line_do_not_change():
    stats = JunctionConnectorStats.of(_stock_stats(), _counters())
    plain = _stock_stats()
    MooncakeStorePromMetrics(_config(), _TYPES, _LABELS, _ENGINES).observe(plain.data)
    stock = _samples()
    unregister_vllm_metrics()
    JunctionPromMetrics(_config(), _TYPES, _LABELS, _ENGINES).observe(stats.data)
    ours = _samples()
    assert stock.items() <= ours.items()
    assert all(name.startswith("vllm:junctions_") for name, *_ in ours.keys() - stock)
    assert plain.reduce().items() <= stats.reduce().items()


def test_the_log_line_sums_counters_and_averages_histograms():
    stats = JunctionConnectorStats.of(None, _counters())
    stats = stats.aggregate(JunctionConnectorStats.of(None, _counters()))
    assert stats.reduce() == {
        "junctions_lookups_tail_missing": 2,
        "junctions_lost_tokens_avg": 3840.0,
        "junctions_tail_bytes_saved": 200,
    }


def test_with_junctions_off_nothing_of_ours_is_exported():
    prom = MooncakeStoreConnector.build_prom_metrics(
        _config({"junctions": False}), _TYPES, _LABELS, _ENGINES
    )
    assert type(prom) is MooncakeStorePromMetrics
    assert not any(
        "junctions" in collector for collector in REGISTRY._names_to_collectors
    )


def test_nothing_counted_is_nothing_reported():
    assert JunctionConnectorStats.of(None, JunctionCounters()) is None
    counters = _counters()
    assert JunctionConnectorStats.of(None, counters) is not None
    assert JunctionConnectorStats.of(None, counters) is None


def test_statistics_survive_pickle_and_vllms_wire_format():
    stats = JunctionConnectorStats.of(_stock_stats(), _counters())
    copy = pickle.loads(pickle.dumps(stats))
    assert type(copy) is JunctionConnectorStats
    wire = MsgpackEncoder().encode(copy.to_dict())
    data = MsgpackDecoder().decode(wire)
    assert MooncakeStoreConnector.build_kv_connector_stats(data).data == stats.data


def _rank_output(stats) -> ModelRunnerOutput:
    output = KVConnectorOutput()
    output.kv_connector_stats = stats
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)


def test_ranks_add_up_whatever_each_of_them_did():
    ranks = [
        JunctionConnectorStats.of(_stock_stats(), JunctionCounters()),
        JunctionConnectorStats.of(None, _counters(7)),
        None,
        JunctionConnectorStats.of(_stock_stats(), _counters(5)),
    ]
    aggregated = KVOutputAggregator(len(ranks)).aggregate(
        [_rank_output(stats) for stats in ranks]
    )
    reduced = aggregated.kv_connector_output.kv_connector_stats.reduce()
    assert reduced["junctions_tail_bytes_saved"] == 12
    assert reduced["junctions_lookups_tail_missing"] == 2
    assert reduced["save_put_total_bytes"] == 8192


def test_under_multiconnector_the_same_figures_come_out(monkeypatch):
    plugin.register()
    child = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    config = _config({"connectors": [child]})
    config.kv_transfer_config.engine_id = "e"
    prom = MultiConnector.build_prom_metrics(config, _TYPES, _LABELS, _ENGINES)
    name = "MooncakeStoreConnector"
    worker = MultiKVConnectorStats(
        {name: JunctionConnectorStats.of(_stock_stats(), _counters(3))}
    )
    scheduler = MultiKVConnectorStats(
        {name: JunctionConnectorStats.of(None, _counters(4))}
    )
    payload = worker.aggregate(scheduler).to_dict()
    prom.observe(payload, 0)
    assert _value("vllm:junctions_tail_bytes_saved_total") == 7
    rebuilt = MultiConnector.build_kv_connector_stats(payload)
    assert rebuilt.reduce()[name]["junctions_tail_bytes_saved"] == 7


def test_vllms_logger_takes_them(monkeypatch):
    plugin.register()
    config = _config().kv_transfer_config
    config.kv_connector_module_path = None
    logging = KVConnectorLogging(config)
    lines: list[str] = []
    for _ in range(2):
        logging.observe(JunctionConnectorStats.of(_stock_stats(), _counters()).data)
    logging.log(lambda text, *args: lines.append(text % args))
    assert "junctions_tail_bytes_saved=200" in lines[0]
    assert "save_put_count=2" in lines[0]


def test_the_rust_front_end_gets_what_it_can_decode(monkeypatch):
    """It knows the stock operations only, and drops a report with more in it."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    counters = _counters()
    stats = JunctionConnectorStats.of(_stock_stats(), counters)
    assert KEY not in stats.data
    assert stats.data.keys() == _stock_stats().data.keys()
    assert counters.take() == []


_API_SERVER = """
import sys
from types import SimpleNamespace
from prometheus_client import Counter, Gauge, Histogram
from vllm.junctions.metrics.counted import INFO, TAIL_BYTES, JunctionCounters
from vllm.junctions.metrics.exported import JunctionConnectorStats, JunctionPromMetrics
config = SimpleNamespace(kv_transfer_config=None)
types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
prom = JunctionPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
counters = JunctionCounters()
counters.add(TAIL_BYTES, int(sys.argv[1]))
counters.observe(INFO, 1, "1", "256", "4", "ab")
prom.observe(JunctionConnectorStats.of(None, counters).data)
"""

_SCRAPE = """
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
print(generate_latest(get_prometheus_registry()).decode())
"""


@pytest.mark.slow
def test_several_api_servers_add_up(tmp_path, monkeypatch):
    """Each of them sees a part of the reports; whoever is scraped shows the sum."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    def run(code: str, *args: str) -> str:
        command = [sys.executable, "-c", code, *args]
        return subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout

    run(_API_SERVER, "30")
    run(_API_SERVER, "12")
    scraped = run(_SCRAPE)
    labels = '{engine="0",model_name="m"}'
    assert f"vllm:junctions_tail_bytes_saved_total{labels} 42.0" in scraped
    assert scraped.count('hash_root="ab"') == 1

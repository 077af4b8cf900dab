# SPDX-License-Identifier: Apache-2.0
"""The connector in its scheduler role, built by vLLM's factory."""

import os

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
    connector as stock,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
    scheduler as stock_scheduler,
)

from tests.support import (
    full,
    groups,
    kv_cache_config,
    mamba,
    swa,
    uninstall_hooks,
    vllm_config,
)
from vllm.junctions import ConfigurationError, UnsupportedRuntimeError, repairs
from vllm.junctions.core import CORE_HOOKS
from vllm.junctions.overlay.drop_in import MooncakeStoreConnector
from vllm.junctions.seams import compat
from vllm.junctions.store.scheduler import JunctionStoreScheduler


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))

    built = []

    def build_connector(specs=None, retention=0, **extra) -> MooncakeStoreConnector:
        connector = MooncakeStoreConnector(
            vllm_config(tmp_path, extra),
            KVConnectorRole.SCHEDULER,
            kv_cache_config(
                groups(specs or [full(32), swa(32, 64)]),
                32,
                retention_interval=retention,
            ),
        )
        built.append(connector)
        return connector

    yield build_connector
    uninstall_hooks()
    for connector in built:
        # Left to the garbage collector, an open socket can hang whole runs.
        connector.connector_scheduler.client.close()


def test_junctions_false_is_the_stock_scheduler_without_hooks(build):
    connector = build(junctions=False)
    assert type(connector.connector_scheduler) is stock_scheduler.MooncakeStoreScheduler
    assert CORE_HOOKS.installed == ()


def test_the_start_up_line_says_what_is_on(build, monkeypatch):
    lines = []
    monkeypatch.setattr(
        "vllm.junctions.overlay.drop_in.logger.info",
        lambda text, *a: lines.append(text % a),
    )
    build()
    (line,) = lines
    assert "junctions on" in line
    assert compat.vllm_version() in line
    assert "5 hooks: Request.shared_prefix_boundaries" in line


def test_settings_are_refused_where_vllm_asks_before_it_loads_a_model():
    with pytest.raises(ConfigurationError, match="'junctions'"):
        MooncakeStoreConnector.requires_piecewise_for_cudagraph({"junctions": "on"})


def test_a_seam_that_does_not_fit_leaves_nothing_behind(build, monkeypatch):
    seams = (compat.Seam(f"{compat.STORE_WORKER}:MooncakeStoreWorker.gone", ()),)
    monkeypatch.setattr(compat, "STORE_SEAMS", seams)
    with pytest.raises(UnsupportedRuntimeError, match=r"MooncakeStoreWorker\.gone"):
        build()
    assert CORE_HOOKS.installed == ()


@pytest.mark.parametrize(
    ("specs", "retention", "why"),
    [
        ([full(32)], 0, "a single group"),
        ([full(32), full(64)], 0, "full attention alone"),
        ([full(32), swa(32, 64)], None, "retention is dense"),
    ],
)
def test_nothing_is_applied_where_nothing_is_to_gain(
    build, monkeypatch, specs, retention, why
):
    lines = []
    monkeypatch.setattr(
        "vllm.junctions.overlay.drop_in.logger.info",
        lambda text, *a: lines.append(text % a),
    )
    before = dict(os.environ)
    connector = build(specs, retention)
    assert type(connector) is stock.MooncakeStoreConnector
    assert type(connector.connector_scheduler) is stock_scheduler.MooncakeStoreScheduler
    assert CORE_HOOKS.installed == repairs.HOOKS.installed == ()
    assert dict(os.environ) == before
    (line,) = lines
    assert why in line


def test_mamba_states_gain_under_dense_retention_too(build):
    connector = build([full(32), mamba(32)], None)
    assert type(connector.connector_scheduler) is JunctionStoreScheduler


def test_a_repair_that_does_not_exist_is_refused(build):
    with pytest.raises(ConfigurationError, match=r"'nosuch'.*padding_rows"):
        build(junctions_repairs=["nosuch"])

# SPDX-License-Identifier: Apache-2.0
"""The connector in its scheduler role, built by vLLM's factory."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
    connector as stock,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
    scheduler as stock_scheduler,
)

from tests.support import full, groups, kv_cache_config, swa, vllm_config
from vllm.junctions import ConfigurationError, UnsupportedRuntimeError
from vllm.junctions.core import CORE_HOOKS
from vllm.junctions.seams import compat
from vllm.junctions.store.connector import MooncakeStoreConnector
from vllm.junctions.store.scheduler import JunctionStoreScheduler


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))

    built = []

    def build_connector(**extra) -> MooncakeStoreConnector:
        connector = MooncakeStoreConnector(
            vllm_config(tmp_path, extra),
            KVConnectorRole.SCHEDULER,
            kv_cache_config(groups([full(32), swa(32, 64)]), 32),
        )
        built.append(connector)
        return connector

    yield build_connector
    CORE_HOOKS.uninstall()
    for connector in built:
        # Left to the garbage collector, an open socket can hang whole runs.
        connector.connector_scheduler.client.close()


def test_the_scheduler_role_gets_our_scheduler_and_the_hooks(build):
    connector = build()
    assert type(connector.connector_scheduler) is JunctionStoreScheduler
    assert len(CORE_HOOKS.installed) == len(CORE_HOOKS.hooks)
    # What was rebound for the constructor is back.
    assert stock.MooncakeStoreScheduler is stock_scheduler.MooncakeStoreScheduler


def test_the_class_keeps_the_name_by_which_vllm_finds_its_metrics(build):
    assert type(build()).__name__ == stock.MooncakeStoreConnector.__name__


def test_junctions_false_is_the_stock_scheduler_without_hooks(build):
    connector = build(junctions=False)
    assert type(connector.connector_scheduler) is stock_scheduler.MooncakeStoreScheduler
    assert CORE_HOOKS.installed == ()


@pytest.mark.parametrize(("extra", "expected"), [({}, True), ({"junctions": False}, 0)])
def test_the_engines_own_cache_manager_is_switched_on(build, extra, expected):
    connector = build(**extra)
    manager = SimpleNamespace(block_pool=None)
    connector.bind_kv_cache_manager(manager)
    assert getattr(manager, "junctions_enabled", 0) == expected


def test_the_start_up_line_says_what_is_on(build, monkeypatch):
    lines = []
    monkeypatch.setattr(
        "vllm.junctions.store.connector.logger.info",
        lambda text, *a: lines.append(text % a),
    )
    build()
    (line,) = lines
    assert "junctions on" in line
    assert compat.vllm_version() in line
    assert "9 hooks: Request.shared_prefix_boundary" in line


def test_settings_are_refused_where_vllm_asks_before_it_loads_a_model():
    with pytest.raises(ConfigurationError, match="'junctions'"):
        MooncakeStoreConnector.requires_piecewise_for_cudagraph({"junctions": "on"})


def test_a_seam_that_does_not_fit_leaves_nothing_behind(build, monkeypatch):
    seams = (compat.Seam(f"{compat.STORE_WORKER}:MooncakeStoreWorker.gone", ()),)
    monkeypatch.setattr(compat, "STORE_SEAMS", seams)
    with pytest.raises(UnsupportedRuntimeError, match=r"MooncakeStoreWorker\.gone"):
        build()
    assert CORE_HOOKS.installed == ()

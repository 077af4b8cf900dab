# SPDX-License-Identifier: Apache-2.0
"""The scheduler side, built by its real constructor, with a scripted client."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import KVConnectorOutput

from tests.support import (
    find_locally,
    full,
    groups,
    hashes,
    kv_cache_config,
    request,
    swa,
    vllm_config,
)
from vllm.junctions import repairs
from vllm.junctions.lookup.client import JunctionLookupClient
from vllm.junctions.lookup.wire import HitUnits
from vllm.junctions.metrics.counted import JunctionCounters
from vllm.junctions.repairs.endless_loads import num_failed_loads
from vllm.junctions.seams.switches import switch_on
from vllm.junctions.store.coordinator import JunctionStoreCoordinator
from vllm.junctions.store.scheduler import JunctionStoreScheduler, hash_root
from vllm.junctions.version import __version__

pytestmark = pytest.mark.usefixtures("core_hooks")


class ScriptedClient:
    """Gives one prepared answer a lookup: ``(result, junctions)``."""

    def __init__(self) -> None:
        self.answers: list[tuple[MooncakeLookupResult | None, tuple | None]] = []
        self.counters = JunctionCounters()
        self._junctions: tuple | None = None

    def lookup(self, req_id, num_tokens, block_hashes, non_block=False):
        result, self._junctions = self.answers.pop(0)
        return result

    def take_junctions(self, req_id):
        junctions, self._junctions = self._junctions, None
        return junctions

    def discard(self, req_id):
        pass


def _scheduler(tmp_path, monkeypatch, **extra) -> JunctionStoreScheduler:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    scheduler = JunctionStoreScheduler(
        vllm_config(tmp_path, extra),
        kv_cache_config(groups([full(32), swa(32, 64)]), 32),
    )
    assert isinstance(scheduler.client, JunctionLookupClient)
    assert scheduler.client.hit_units == HitUnits(32, hit=32, block_size=32)
    assert isinstance(scheduler._store_coord, JunctionStoreCoordinator)
    scheduler.client.close()
    scheduler.client = ScriptedClient()
    return scheduler


@pytest.fixture
def scheduler(tmp_path, monkeypatch) -> JunctionStoreScheduler:
    return _scheduler(tmp_path, monkeypatch)


def _request(num_tokens=1000):
    r = request("r", num_tokens)
    r.block_hashes = hashes(num_tokens // 32)
    return r


def test_a_client_that_knows_no_junctions_answers_as_in_stock(scheduler):
    r = _request()
    scheduler.client = SimpleNamespace(
        lookup=lambda *args, **_: MooncakeLookupResult(0)
    )
    assert scheduler.get_num_new_matched_tokens(r, 0) == (0, False)
    assert r.shared_prefix_boundaries == ()


def _fail(scheduler, *req_ids, invalid_block_ids=()):
    output = KVConnectorOutput(
        failed_recving=set(req_ids), invalid_block_ids=set(invalid_block_ids)
    )
    scheduler.update_connector_output(output)


@pytest.fixture
def repaired(scheduler):
    """The scheduler with the repair of endless loads on."""
    repairs.HOOKS.install()
    switch_on(scheduler, ["endless_loads"])
    yield scheduler
    repairs.HOOKS.uninstall()


def test_a_lookup_in_flight_stays_one_after_failed_loads(repaired):
    scheduler, r = repaired, _request()
    scheduler._unfinished_request_ids = {"r"}
    scheduler.client.answers = [(None, None), (MooncakeLookupResult(256), ())]
    _fail(scheduler, "r")
    _fail(scheduler, "r")
    assert scheduler.get_num_new_matched_tokens(r, 0) == (None, False)
    assert scheduler.get_num_new_matched_tokens(r, 0) == (0, False)


def test_a_failed_block_counts_for_the_request_that_loads_into_it(repaired):
    scheduler = repaired
    scheduler._unfinished_request_ids = {"r", "other"}
    scheduler._unfinished_requests = {
        "r": (_request(), ([1, 2],)),
        "other": (_request(), ([3],)),
    }
    _fail(scheduler, invalid_block_ids=[2, 9])
    _fail(scheduler, invalid_block_ids=[1])
    assert num_failed_loads(scheduler) == {"r": 2}


def _counted(counters) -> dict[tuple[str, ...], float]:
    return {
        (r["name"].removeprefix("vllm:junctions_"), *r["labels"]): r["value"]
        for r in counters.take()
    }


def test_a_prompt_that_is_too_short_is_counted_once_though_asked_often(scheduler):
    for _ in range(3):
        scheduler.get_num_new_matched_tokens(_request(31), 0)
    assert _counted(scheduler.counters) == {("lookups_total", "too_short"): 1}


def test_a_prompt_that_is_not_looked_up_by_configuration_is_not_counted(
    tmp_path, monkeypatch
):
    scheduler = _scheduler(tmp_path, monkeypatch, enable_lookup=False)
    scheduler.get_num_new_matched_tokens(_request(31), 0)
    assert _counted(scheduler.counters) == {}


def test_junctions_are_counted_by_source_once_a_request(scheduler):
    r = _request()
    scheduler.client.answers = [(MooncakeLookupResult(0), (512, 544))] * 2
    find_locally(r, 480, 512)
    for _ in range(2):  # asked again, and scheduled again once its load has come
        scheduler.get_num_new_matched_tokens(r, 0)
        scheduler.update_state_after_alloc(r, SimpleNamespace(), 0)
    assert _counted(scheduler.counters) == {
        ("found_total", "local"): 2,
        ("found_total", "store"): 2,
    }


def test_the_first_report_says_what_instances_must_agree_on(scheduler, monkeypatch):
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"one", raising=False)
    first = scheduler.get_kv_connector_stats()
    ((name, version, block, unit, root),) = _counted(
        SimpleNamespace(take=lambda: first.data["junctions"])
    )
    assert (name, version, block, unit) == ("info", __version__, "32", "32")
    assert scheduler.get_kv_connector_stats() is None
    assert root == hash_root()
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"two")
    assert root != hash_root()

# SPDX-License-Identifier: Apache-2.0
"""The scheduler side, built by its real constructor, with a scripted client."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    MooncakeStoreConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import (
    MooncakeStoreScheduler,
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


def test_a_finished_lookup_gives_the_request_its_junctions(scheduler):
    r = _request()
    find_locally(r, 96, 128)
    scheduler.client.answers = [(MooncakeLookupResult(0), (480, 512))]
    assert scheduler.get_num_new_matched_tokens(r, 0) == (0, False)
    assert r.shared_prefix_boundaries == (96, 128, 480, 512)


def test_a_lookup_under_way_merges_on_the_step_at_which_it_is_ready(scheduler):
    r = _request()
    scheduler.client.answers = [(None, None), (MooncakeLookupResult(0), (512,))]
    assert scheduler.get_num_new_matched_tokens(r, 0) == (None, False)
    assert r.shared_prefix_boundaries == ()
    find_locally(r)  # vLLM looks up locally again on the retry
    scheduler.get_num_new_matched_tokens(r, 0)
    assert r.shared_prefix_boundaries == (512,)


def test_a_failed_lookup_merges_nothing(scheduler):
    r = _request()
    scheduler.client.answers = [
        (MooncakeLookupResult(0), (512,)),
        (MooncakeLookupResult(0), None),
    ]
    scheduler.get_num_new_matched_tokens(r, 0)
    scheduler.get_num_new_matched_tokens(r, 0)
    assert r.shared_prefix_boundaries == (512,)


def test_a_client_that_knows_no_junctions_answers_as_in_stock(scheduler):
    r = _request()
    scheduler.client = SimpleNamespace(
        lookup=lambda *args, **_: MooncakeLookupResult(0)
    )
    assert scheduler.get_num_new_matched_tokens(r, 0) == (0, False)
    assert r.shared_prefix_boundaries == ()


def test_a_hit_beside_junctions_is_loaded_as_in_stock(scheduler):
    r = _request()
    scheduler.client.answers = [(MooncakeLookupResult(256), (512,))]
    assert scheduler.get_num_new_matched_tokens(r, 128) == (128, True)
    assert r.shared_prefix_boundaries == (512,)


def test_a_prompt_shorter_than_a_block_is_not_looked_up(scheduler):
    r = _request(31)
    assert scheduler.get_num_new_matched_tokens(r, 0) == (0, False)
    assert r.shared_prefix_boundaries == ()


def test_a_disabled_lookup_merges_nothing(tmp_path, monkeypatch):
    scheduler = _scheduler(tmp_path, monkeypatch, enable_lookup=False)
    r = _request()
    assert scheduler.get_num_new_matched_tokens(r, 0) == (0, False)
    assert r.shared_prefix_boundaries == ()


def _job(req_id="r", can_save=True) -> ReqMeta:
    return ReqMeta(req_id, 512, ([1], [2]), hashes(4), can_save=can_save)


def _build(scheduler, monkeypatch, jobs, finished=()):
    """What ours makes of the metadata that stock's method built."""
    meta = MooncakeStoreConnectorMetadata(set(), set())
    meta.requests = jobs
    monkeypatch.setattr(
        MooncakeStoreScheduler, "build_connector_meta", lambda self, output: meta
    )
    output = SimpleNamespace(finished_req_ids=set(finished))
    return scheduler.build_connector_meta(output).requests


def test_every_save_job_of_a_request_names_its_junctions(scheduler, monkeypatch):
    r = _request()
    find_locally(r, 512)
    scheduler.update_state_after_alloc(r, SimpleNamespace(), 0)
    for _ in range(3):
        (job,) = _build(scheduler, monkeypatch, [_job()])
        assert job.shared_prefix_boundaries == (512,)


def test_a_load_job_stays_as_it_is(scheduler, monkeypatch):
    load = _job(can_save=False)
    assert _build(scheduler, monkeypatch, [load]) == [load]
    assert not hasattr(load, "shared_prefix_boundaries")


def test_a_resumed_request_still_saves_the_junctions_it_had(scheduler, monkeypatch):
    """After preemption its own prefix hits, so nothing is derived again."""
    r = _request()
    scheduler.client.answers = [
        (MooncakeLookupResult(0), (512,)),
        (MooncakeLookupResult(960), ()),
    ]
    scheduler.get_num_new_matched_tokens(r, 0)
    scheduler.update_state_after_alloc(r, SimpleNamespace(), 0)
    find_locally(r)
    scheduler.get_num_new_matched_tokens(r, 960)
    scheduler.load_specs.clear()
    scheduler.update_state_after_alloc(r, SimpleNamespace(), 0)
    assert r.shared_prefix_boundaries == ()
    (job,) = _build(scheduler, monkeypatch, [_job()])
    assert job.shared_prefix_boundaries == (512,)


def test_a_finished_request_is_forgotten(scheduler, monkeypatch):
    r = _request()
    find_locally(r, 512)
    scheduler.update_state_after_alloc(r, SimpleNamespace(), 0)
    _build(scheduler, monkeypatch, [], finished=["r"])
    (job,) = _build(scheduler, monkeypatch, [_job()])
    assert job.shared_prefix_boundaries == ()


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


def test_after_two_failed_loads_a_request_is_offered_no_hit(repaired, monkeypatch):
    scheduler, r = repaired, _request()
    scheduler._unfinished_request_ids = {"r"}
    scheduler.client.answers = [(MooncakeLookupResult(256), (512,))] * 4
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens(r, 0) == (256, True)
        _fail(scheduler, "r")
    assert scheduler.get_num_new_matched_tokens(r, 0) == (0, False)
    assert scheduler.load_specs == {}
    # What its lookups report is still worth saving.
    assert r.shared_prefix_boundaries == (512,)
    assert scheduler.client.counters.failed_loads == 2


def test_a_lookup_in_flight_stays_one_after_failed_loads(repaired):
    scheduler, r = repaired, _request()
    scheduler._unfinished_request_ids = {"r"}
    scheduler.client.answers = [(None, None), (MooncakeLookupResult(256), ())]
    _fail(scheduler, "r")
    _fail(scheduler, "r")
    assert scheduler.get_num_new_matched_tokens(r, 0) == (None, False)
    assert scheduler.get_num_new_matched_tokens(r, 0) == (0, False)


def test_a_load_that_fails_after_its_request_ended_counts_for_nobody(repaired):
    _fail(repaired, "ended")
    assert num_failed_loads(repaired) == {}
    assert repaired.client.counters.failed_loads == 0


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


def test_faults_of_the_client_are_reported_by_the_scheduler(scheduler):
    scheduler.get_kv_connector_stats()
    scheduler.client.counters.add_fault("dropped_entries", "Dropped.", 3)
    (record,) = scheduler.get_kv_connector_stats().data["junctions"]
    assert (record["labels"], record["value"]) == (["dropped_entries"], 3)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A reset can preempt requests that the very next pass resumes."""

from types import SimpleNamespace

import pytest

from tests.v1.kv_connector.unit.test_mooncake_store_scheduler import (
    _make_bare_scheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    LoadSpec,
    RequestTracker,
)
from vllm.v1.core.sched.output import KVConnectorBlockState

pytestmark = pytest.mark.cpu_test


def _scheduler(*, allocated: bool = True):
    """It has served ``req-0``, preempted it, and allocated blocks for it anew."""
    scheduler = _make_bare_scheduler()
    scheduler._store_group_ids = (0, 1)
    request = SimpleNamespace(
        num_tokens=32,
        num_prompt_tokens=32,
        num_computed_tokens=0,
        all_token_ids=list(range(32)),
        block_hashes=[b"0" * 8, b"1" * 8],
    )
    scheduler._unfinished_requests["req-0"] = (request, ([1, 2], [3, 4]))
    scheduler._request_trackers["req-0"] = RequestTracker("req-0", 16, ([5], [6]))
    scheduler._allocated_ids = {"req-0"} if allocated else set()
    return scheduler


def _step(scheduler, *, resumed: bool):
    req_ids = ["req-0"] if resumed else []
    output = SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids={"req-0"},
        scheduled_new_reqs=[],
        num_scheduled_tokens={"req-0": 32},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=req_ids,
            new_block_ids=[([1, 2], [3, 4])],
            num_computed_tokens=[0],
            resumed_req_ids=set(req_ids),
        ),
        kv_connector_block_state=KVConnectorBlockState(
            req_ids={"req-0"},
            resolve_block_ids=lambda _req_id: ([1, 2], [3, 4]),
            boundary_state_offloads={},
        ),
    )
    return scheduler.build_connector_meta(output).requests


def test_a_resumed_run_is_saved():
    (save,) = _step(_scheduler(), resumed=True)

    assert save.can_save
    assert save.token_len_chunk == 32


def test_a_resumed_runs_load_is_issued():
    scheduler = _scheduler()
    scheduler.load_specs["req-0"] = LoadSpec(0, 16, can_load=True)

    (load,) = _step(scheduler, resumed=False)

    assert load.load_spec is not None


def test_what_was_only_preempted_is_dropped():
    scheduler = _scheduler(allocated=False)

    assert _step(scheduler, resumed=False) == []
    assert "req-0" not in scheduler._unfinished_requests

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""After a failed load a request holds nothing, and reserves nothing."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from vllm.v1.core.sched.scheduler import Scheduler

pytestmark = pytest.mark.cpu_test


@pytest.mark.parametrize(("num_valid_tokens", "reserves"), [(0, False), (32, True)])
def test_only_what_a_load_left_keeps_a_reservation(num_valid_tokens, reserves):
    request = MagicMock(request_id="r", num_computed_tokens=num_valid_tokens)
    request.num_tokens = 100
    scheduler = SimpleNamespace(
        connector=MagicMock(),
        kv_cache_manager=MagicMock(),
        needs_kv_cache_zeroing=False,
        failed_recving_kv_req_ids={"r"},
        finished_recving_kv_req_ids={"r"},
        _inflight_prefills={request},
        _mark_prefix_replay=lambda *_args, **_kwargs: 0,
        _load_restores_replay_window=lambda _request: False,
    )

    Scheduler._update_waiting_for_remote_kv(scheduler, request)

    assert (request in scheduler._inflight_prefills) == reserves

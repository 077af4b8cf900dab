# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Padding rows of a speculative step are scheduled, but hold no token to save."""

from types import SimpleNamespace

import pytest

from tests.v1.kv_connector.unit.test_mooncake_store_scheduler import (
    _make_bare_scheduler,
)
from vllm.v1.core.sched.output import KVConnectorBlockState

pytestmark = pytest.mark.cpu_test


def _save(num_tokens: int, num_scheduled: int):
    """The save of a request that enters with all but one token computed."""
    scheduler = _make_bare_scheduler()
    request = SimpleNamespace(
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        block_hashes=[bytes([i]) * 8 for i in range(num_tokens // 16 + 1)],
    )
    scheduler._unfinished_requests["req-0"] = (request, ([1, 2], [3, 4]))
    new = SimpleNamespace(
        req_id="req-0",
        num_computed_tokens=num_tokens - 1,
        block_ids=([1, 2], [3, 4]),
        prompt_token_ids=list(range(num_tokens)),
        prefill_token_ids=None,
    )
    output = SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=set(),
        scheduled_new_reqs=[new],
        num_scheduled_tokens={"req-0": num_scheduled},
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set()),
        kv_connector_block_state=KVConnectorBlockState(
            req_ids={"req-0"},
            resolve_block_ids=lambda _req_id: ([1, 2], [3, 4]),
            boundary_state_offloads={},
        ),
    )
    return scheduler.build_connector_meta(output).requests


def test_padding_does_not_complete_a_block():
    assert _save(num_tokens=31, num_scheduled=2)[0].token_len_chunk == 16


def test_the_token_itself_does():
    assert _save(num_tokens=32, num_scheduled=2)[0].token_len_chunk == 32

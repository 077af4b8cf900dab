# SPDX-License-Identifier: Apache-2.0
"""Mamba prefill chunks, split by vLLM's own method on a stand-in for its state."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support import request
from vllm.junctions.core.request import set_junctions

pytestmark = pytest.mark.usefixtures("core_hooks")


def _scheduler() -> SimpleNamespace:
    """What the split reads of a scheduler: Mamba blocks of 32, no EAGLE."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        hash_block_size=32,
        block_size=32,
        max_num_scheduled_tokens=8192,
        mamba_partial_cache_hit=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_shared_prefix_checkpoint=False,
        mamba_prefill_checkpoint_alignment=None,
        use_eagle_block_drop=False,
        num_hash_lookahead_tokens=0,
        max_num_running_reqs=8,
        waiting=[],
    )


def _chunk_ends(r, num_prompt_tokens: int) -> list[int]:
    """Positions at which the prefill chunks of a request end."""
    ends, start = [], 0
    while start < num_prompt_tokens:
        r.num_computed_tokens = start
        start += Scheduler._mamba_block_aligned_split(
            _scheduler(), r, num_prompt_tokens - start
        )
        ends.append(start)
    return ends


def test_vllms_own_stop_comes_first_whatever_the_store_reports():
    """Requests of the same pass hit what the first chunk reaches."""
    r = request(num_tokens=500)
    r.shared_prefix_boundary = 256
    set_junctions(r, local=(224, 256), store=(96, 128, 352, 384))
    assert _chunk_ends(r, 500) == [256, 384, 480, 500]

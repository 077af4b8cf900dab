# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Several shared-prefix boundaries per request: found, kept, stopped at."""

from types import SimpleNamespace

import pytest

from tests.v1.core.test_prefix_caching import (
    _make_hybrid_kv_cache_config,
    make_kv_cache_manager,
    make_request,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_coordinator import junction_boundaries
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler

pytestmark = pytest.mark.cpu_test

BLOCK = 16
SHARED = [7] * (6 * BLOCK)


@pytest.fixture(autouse=True)
def _hash_root():
    init_none_hash(sha256)


def _manager(use_eagle: bool):
    """Full attention beside a sliding window of two blocks, sparse retention."""
    config = _make_hybrid_kv_cache_config(BLOCK, 200, ["full", "sliding_window"])
    for group in config.kv_cache_groups:
        group.is_eagle_group = use_eagle
    return make_kv_cache_manager(
        config,
        max_model_len=8192,
        enable_caching=True,
        use_eagle=use_eagle,
        hash_block_size=BLOCK,
        retention_interval=0,
    )


def _own(token: int) -> list[int]:
    return [token] * (4 * BLOCK)


def _serve(manager, request_id: str, prompt: list[int], external=()):
    request = make_request(request_id, prompt, BLOCK, sha256)
    blocks, hit, boundaries = manager.get_computed_blocks(request)
    request.local_prefix_boundaries = boundaries
    request.external_prefix_boundaries = external
    manager.allocate_slots(request, len(prompt) - hit, hit, blocks)
    return hit, boundaries


@pytest.mark.parametrize(
    ("hit", "longest", "use_eagle", "expected"),
    [
        (0, 3840, False, (3840,)),
        (0, 3840, True, (3584, 3840)),
        # Nothing lower is left of it.
        (0, 256, True, (256,)),
        (3584, 3840, True, (3840,)),
        (3840, 3840, True, ()),
        (3840, 0, False, ()),
    ],
)
def test_junction_boundaries(hit, longest, use_eagle, expected):
    assert junction_boundaries(hit, longest, 256, use_eagle) == expected


@pytest.mark.parametrize(
    ("use_eagle", "num_more", "expected"),
    [
        (False, 0, 6 * BLOCK),
        # The proof block above is shared: the upper position is proven.
        (True, BLOCK, 6 * BLOCK),
        # It is not: one block lower.
        (True, 0, 5 * BLOCK),
    ],
)
def test_later_siblings_resume_where_they_part(use_eagle, num_more, expected):
    manager = _manager(use_eagle)
    shared = SHARED + [8] * num_more
    assert _serve(manager, "0", shared + _own(50))[0] == 0
    assert _serve(manager, "1", shared + _own(60))[0] == 0

    assert _serve(manager, "2", shared + _own(70))[0] == expected


def test_a_sibling_that_parts_within_the_proof_block_resumes_lower():
    manager = _manager(use_eagle=True)
    longer = SHARED + [8] * BLOCK
    _serve(manager, "0", longer + _own(50))
    _, boundaries = _serve(manager, "1", longer + _own(60))
    assert boundaries == (5 * BLOCK, 6 * BLOCK)

    assert _serve(manager, "2", SHARED + _own(70))[0] == 5 * BLOCK


def test_what_a_connector_reports_is_kept_locally():
    reported = (3 * BLOCK,)
    manager = _manager(use_eagle=False)
    _serve(manager, "0", SHARED + _own(50), external=reported)

    assert _serve(manager, "1", SHARED[: 3 * BLOCK] + _own(60))[0] == 3 * BLOCK


def test_deriving_the_local_part_again_keeps_the_external_one():
    request = make_request("0", SHARED, BLOCK, sha256)
    request.local_prefix_boundaries = (96,)
    request.external_prefix_boundaries = (64, 96)
    assert request.shared_prefix_boundaries == (64, 96)

    request.local_prefix_boundaries = ()

    assert request.shared_prefix_boundaries == (64, 96)


@pytest.mark.parametrize(
    ("local", "external", "expected"),
    [
        ((), (), ()),
        ((), (288, 304), (288, 304)),
        # Today's stop first, and no more than one beside it.
        ((288, 304), (256, 272), (304,)),
        ((288, 304), (320, 336), (304, 336)),
        ((304,), (288, 304), (304,)),
    ],
)
def test_chunks_end_at_two_boundaries_at_most(local, external, expected):
    request = make_request("0", SHARED, BLOCK, sha256)
    request.local_prefix_boundaries = local
    request.external_prefix_boundaries = external

    assert request.prefill_stops == expected


def _split(request, waiting=()):
    stub = SimpleNamespace(
        block_size=BLOCK,
        cache_config=SimpleNamespace(block_size=BLOCK),
        max_num_scheduled_tokens=100 * BLOCK,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        use_eagle_block_drop=False,
        num_hash_lookahead_tokens=0,
        hash_block_size=BLOCK,
        mamba_partial_cache_hit=False,
        mamba_shared_prefix_checkpoint=False,
        mamba_has_prefill_checkpoint_blocks=False,
        waiting=waiting,
    )
    return Scheduler._mamba_block_aligned_split(
        stub, request, request.num_tokens - request.num_computed_tokens
    )


@pytest.mark.parametrize(
    ("computed", "chunk"), [(0, 2), (2 * BLOCK, 3), (5 * BLOCK, 4)]
)
def test_mamba_chunks_end_at_the_next_of_several(computed, chunk):
    request = make_request("0", SHARED + _own(50), BLOCK, sha256)
    request.num_computed_tokens = computed
    request.local_prefix_boundaries = (2 * BLOCK,)
    request.external_prefix_boundaries = (5 * BLOCK,)

    assert _split(request) == chunk * BLOCK


@pytest.mark.parametrize(
    ("prompt", "chunk"),
    [
        # The first chunk reaches as far as it does without the boundary.
        (SHARED + _own(60), 9),
        (SHARED[: 2 * BLOCK], 9),
        (SHARED[:BLOCK] + _own(60), 2),
        (SHARED[:BLOCK], 2),
    ],
)
def test_a_connectors_boundary_is_left_to_a_sibling_that_waits(prompt, chunk):
    request = make_request("0", SHARED + _own(50), BLOCK, sha256)
    request.external_prefix_boundaries = (2 * BLOCK,)
    waiting = [request, make_request("1", prompt, BLOCK, sha256)]

    assert _split(request, waiting) == chunk * BLOCK


def test_a_local_boundary_is_not():
    request = make_request("0", SHARED + _own(50), BLOCK, sha256)
    request.local_prefix_boundaries = (2 * BLOCK, 3 * BLOCK)
    request.external_prefix_boundaries = (5 * BLOCK,)
    waiting = [request, make_request("1", SHARED + _own(60), BLOCK, sha256)]

    assert _split(request, waiting) == 3 * BLOCK


def test_a_boundary_within_the_first_hash_block_is_left_to_nobody():
    prompt = SHARED + _own(50)
    request = make_request("0", prompt, BLOCK, sha256)
    request.external_prefix_boundaries = (BLOCK - 1, 2 * BLOCK)
    waiting = [request, make_request("1", prompt, BLOCK, sha256)]

    assert _split(request, waiting) == 2 * BLOCK

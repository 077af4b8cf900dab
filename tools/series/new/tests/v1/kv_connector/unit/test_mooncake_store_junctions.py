# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Shared-prefix junctions in the Mooncake store: lookup, wire, scheduler, save."""

from types import SimpleNamespace

import pytest
import torch

from tests.v1.kv_connector.unit.test_mooncake_store_scheduler import (
    _make_bare_scheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (  # noqa: E501
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    TailKeyBoundary,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol import (
    JUNCTION_GROUP_ID,
    TAIL_KEY_BOUNDARY_ENTRY_SIZE,
    decode_lookup_response,
    encode_lookup_response,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import (
    MooncakeStoreScheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

pytestmark = pytest.mark.cpu_test

BLOCK = 16
HASHES = [BlockHash(bytes([i + 1]) * 8) for i in range(12)]
FULL = FullAttentionSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
)
SWA = SlidingWindowSpec(
    block_size=BLOCK,
    num_kv_heads=1,
    head_size=1,
    dtype=torch.float32,
    sliding_window=2 * BLOCK,
)
MAMBA = MambaSpec(
    block_size=BLOCK,
    shapes=((1,),),
    dtypes=(torch.float32,),
    mamba_cache_mode="align",
)


def _coordinator(*specs, use_eagle=False, retention_interval=0):
    return MooncakeStoreCoordinator(
        [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)],
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        use_eagle=use_eagle,
        retention_interval=retention_interval,
    )


def _holding(*ends_by_group: list[int]) -> ExternalCachedBlockPool:
    """A store that has, of each group, the blocks that end at these blocks."""
    return ExternalCachedBlockPool(
        BLOCK,
        {
            (group_id, bytes(HASHES[end - 1]))
            for group_id, ends in enumerate(ends_by_group)
            for end in ends
        },
    )


# ----- Lookup -----


@pytest.mark.parametrize(("use_eagle", "expected"), [(False, (6,)), (True, (4, 5))])
def test_junctions_lie_where_full_attention_reaches(use_eagle, expected):
    coord = _coordinator(FULL, SWA, use_eagle=use_eagle)
    pool = _holding([1, 2, 3, 4, 5, 6], [])

    found = coord.find_junctions(HASHES, 12 * BLOCK, 0, pool)

    assert found == tuple(block * BLOCK for block in expected)


def test_no_junction_where_every_group_hits():
    coord = _coordinator(FULL, SWA)
    pool = _holding([1, 2, 3, 4], [3, 4])

    assert coord.find_junctions(HASHES, 12 * BLOCK, 4 * BLOCK, pool) == ()


def test_a_sparse_tail_beyond_full_attention_is_no_junction():
    coord = _coordinator(FULL, SWA)
    pool = _holding([1, 2], [7, 8])

    assert coord.find_junctions(HASHES, 12 * BLOCK, 0, pool) == (2 * BLOCK,)


# ----- Wire -----


def test_junctions_survive_the_wire():
    result = MooncakeLookupResult(
        32, (TailKeyBoundary(0, 32), TailKeyBoundary(1, 48)), (3584, 3840)
    )

    assert decode_lookup_response(encode_lookup_response(result)) == result


def test_junctions_without_a_hit_survive_the_wire():
    result = MooncakeLookupResult(0, (), (3840,))

    assert decode_lookup_response(encode_lookup_response(result)) == result


def test_the_wire_is_the_old_one_without_junctions():
    payload = encode_lookup_response(
        MooncakeLookupResult(32, (TailKeyBoundary(1, 32),))
    )

    assert payload == b"".join(n.to_bytes(4, "big") for n in (32, 1, 32))


def test_junctions_come_last_and_under_no_group():
    payload = encode_lookup_response(
        MooncakeLookupResult(32, (TailKeyBoundary(1, 32),), (64,))
    )

    last = payload[-TAIL_KEY_BOUNDARY_ENTRY_SIZE:]
    assert last == b"".join(n.to_bytes(4, "big") for n in (JUNCTION_GROUP_ID, 64))


# ----- Save -----


@pytest.mark.parametrize(
    ("use_eagle", "expected"), [(False, {2, 3}), (True, {2, 3, 4})]
)
def test_a_junction_keeps_its_tail(use_eagle, expected):
    """Two blocks of window, and under EAGLE the block that proves them."""
    coord = _coordinator(FULL, SWA, use_eagle=use_eagle)

    full, swa = coord.store_mask(8 * BLOCK, junctions=(4 * BLOCK,))

    assert full is None
    assert {block for block, keep in enumerate(swa) if keep} == expected


def test_a_suffix_mask_is_the_tail_of_the_full_one():
    coord = _coordinator(FULL, SWA)
    _, whole = coord.store_mask(8 * BLOCK, junctions=(4 * BLOCK,))

    _, suffix = coord.store_mask(8 * BLOCK, 3 * BLOCK, junctions=(4 * BLOCK,))

    assert suffix == whole[3:]


def test_dense_retention_and_mamba_are_left_alone():
    coord = _coordinator(FULL, SWA, retention_interval=None)
    assert coord.store_mask(8 * BLOCK, junctions=(64,)) == coord.store_mask(8 * BLOCK)

    coord = _coordinator(FULL, MAMBA)
    assert coord.store_mask(8 * BLOCK, junctions=(64,))[1] == [False] * 8


# ----- Scheduler -----


class _Client:
    """Answers every lookup with the same result."""

    def __init__(self, result: MooncakeLookupResult | None) -> None:
        self.result = result

    def lookup(self, *_args, **_kwargs):
        return self.result

    def discard(self, _req_id: str) -> None:
        pass


def _scheduler(result: MooncakeLookupResult | None) -> MooncakeStoreScheduler:
    scheduler = _make_bare_scheduler()
    scheduler._store_group_ids = (0, 1)
    scheduler.client = _Client(result)
    return scheduler


def _request(num_tokens: int = 12 * BLOCK):
    return SimpleNamespace(
        request_id="r",
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_hashes=HASHES,
        all_token_ids=list(range(num_tokens)),
        local_prefix_boundaries=(),
        external_prefix_boundaries=(),
        shared_prefix_boundaries=(),
    )


def test_a_lookup_gives_the_request_its_junctions():
    request = _request()
    scheduler = _scheduler(MooncakeLookupResult(0, (), (64, 96)))

    scheduler.get_num_new_matched_tokens(request, 0)

    assert request.external_prefix_boundaries == (64, 96)


def test_junctions_outside_the_request_are_dropped():
    request = _request(num_tokens=80)
    scheduler = _scheduler(MooncakeLookupResult(0, (), (0, 64, 96)))

    scheduler.get_num_new_matched_tokens(request, 0)

    assert request.external_prefix_boundaries == (64,)


def test_a_lookup_in_flight_leaves_them_as_they_were():
    request = _request()
    request.external_prefix_boundaries = (64,)

    assert _scheduler(None).get_num_new_matched_tokens(request, 0) == (None, False)
    assert request.external_prefix_boundaries == (64,)


def _step(scheduler, *, new=(), cached=(), preempted=(), finished=()):
    """Build the metadata of a step in which ``r`` computes two blocks."""
    scheduled = {"r": 2 * BLOCK}
    output = SimpleNamespace(
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
        scheduled_new_reqs=list(new),
        num_scheduled_tokens=scheduled,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[([1, 2], [3, 4])] * len(cached),
            num_computed_tokens=[0] * len(cached),
            resumed_req_ids=set(cached),
        ),
        kv_connector_block_state=KVConnectorBlockState(
            req_ids={"r"},
            resolve_block_ids=lambda _req_id: ([1, 2], [3, 4]),
            boundary_state_offloads={},
        ),
    )
    return scheduler.build_connector_meta(output).requests


def _alloc(scheduler, request) -> None:
    blocks = KVCacheBlocks(([KVCacheBlock(1)], [KVCacheBlock(3)]))
    scheduler.update_state_after_alloc(request, blocks, 0)


def test_saves_name_the_junctions_also_after_preemption():
    """The resumed request's own tuple is derived anew; its tails are still due."""
    scheduler = _scheduler(MooncakeLookupResult(0))
    request = _request()
    request.shared_prefix_boundaries = (64, 96)
    _alloc(scheduler, request)
    new = SimpleNamespace(
        req_id="r",
        num_computed_tokens=0,
        block_ids=([1, 2], [3, 4]),
        prompt_token_ids=request.all_token_ids,
        prefill_token_ids=None,
    )
    (save,) = _step(scheduler, new=[new])
    assert save.junctions == (64, 96)

    _step(scheduler, preempted=["r"])
    request.shared_prefix_boundaries = ()
    _alloc(scheduler, request)
    (save,) = _step(scheduler, cached=["r"])

    assert save.junctions == (64, 96)


def test_nothing_is_kept_of_a_request_that_ended():
    scheduler = _scheduler(MooncakeLookupResult(0))
    request = _request()
    request.shared_prefix_boundaries = (64,)
    _alloc(scheduler, request)

    _step(scheduler, finished=["r"])

    assert scheduler._junctions == {}

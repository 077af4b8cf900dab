# SPDX-License-Identifier: Apache-2.0
"""vLLM's real cache manager with the hooks on."""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.support import full, groups, kv_cache_config, mamba, swa
from vllm.junctions.core.managers import JUNCTIONS
from vllm.junctions.core.request import set_junctions
from vllm.junctions.seams.switches import switch_on

pytestmark = pytest.mark.usefixtures("core_hooks")

_BLOCK = 32


def _manager(specs, eagle=(), enabled=True, hash_block_size=_BLOCK, **kwargs):
    init_none_hash(sha256)
    manager = KVCacheManager(
        kv_cache_config=kv_cache_config(groups(specs, eagle), hash_block_size),
        max_model_len=8192,
        max_in_flight_tokens=8192,
        enable_caching=True,
        use_eagle=bool(eagle),
        scheduler_block_size=_BLOCK,
        hash_block_size=hash_block_size,
        **kwargs,
    )
    if enabled:
        switch_on(manager, [JUNCTIONS])
    return manager


def _request(req_id: str, tokens: list[int], hash_block_size=_BLOCK) -> Request:
    return Request(
        request_id=req_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
    )


def _second_sibling(manager: KVCacheManager) -> Request:
    """Serve a request, and look up another that shares ten blocks with it."""
    shared = list(range(10 * _BLOCK))
    first, second = (
        _request(name, shared + list(range(start, start + 6 * _BLOCK)))
        for name, start in (("a", 1000), ("b", 2000))
    )
    manager.get_computed_blocks(first)
    manager.allocate_slots(first, first.num_tokens)
    manager.free(first)
    _, hit, second.shared_prefix_boundary = manager.get_computed_blocks(second)
    assert (hit, second.shared_prefix_boundary) == (0, 320)
    return second


@pytest.mark.parametrize(("eagle", "junctions"), [((), (320,)), ((1,), (288, 320))])
def test_a_local_lookup_with_eagle_gives_the_block_below_too(eagle, junctions):
    second = _second_sibling(_manager([full(_BLOCK), swa(_BLOCK, 64)], eagle))
    assert second.shared_prefix_boundaries == junctions


def test_an_engine_without_the_connector_stays_stock():
    specs = [full(_BLOCK), swa(_BLOCK, 64)]
    second = _second_sibling(_manager(specs, eagle=(1,), enabled=False))
    assert second.shared_prefix_boundaries == ()


@pytest.mark.parametrize(("junctions", "expected"), [((), 0), ((80, 144), 80)])
def test_a_mamba_state_inside_a_block_is_kept_at_a_junction(junctions, expected):
    """Partial hash hits under EAGLE, where vLLM compares with one position."""
    manager = _manager(
        [full(_BLOCK), mamba(_BLOCK)],
        eagle=(0,),
        hash_block_size=16,
        enable_mamba_shared_prefix_checkpoint=True,
    )
    shared = list(range(96))
    b = _request("b", shared + list(range(2000, 2200)), 16)
    set_junctions(b, store=junctions)
    for end in (80, 96, b.num_tokens):
        manager.new_step_starts()
        manager.allocate_slots(b, end - b.num_computed_tokens)
        b.num_computed_tokens = end
    manager.free(b)
    manager.new_step_starts()
    c = _request("c", shared + list(range(3000, 3200)), 16)
    assert manager.get_computed_blocks(c)[1] == expected

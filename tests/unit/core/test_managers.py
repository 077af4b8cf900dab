# SPDX-License-Identifier: Apache-2.0
"""vLLM's real cache manager with the hooks on."""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.support import full, groups, kv_cache_config, mamba, swa
from vllm.junctions.core.managers import JUNCTIONS, drops_eagle_block
from vllm.junctions.core.request import set_junctions, shared_prefix_boundaries
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


def _serve(manager: KVCacheManager, r: Request, store_junctions=()) -> int:
    """Compute a request in one chunk and free it; return its local hit."""
    blocks, hit, r.shared_prefix_boundary = manager.get_computed_blocks(r)
    set_junctions(r, store=store_junctions)
    manager.allocate_slots(r, r.num_tokens - hit, hit, blocks)
    manager.free(r)
    return hit


_SHARED = list(range(10 * _BLOCK))


def _sibling(req_id: str, start: int, shared=_SHARED) -> Request:
    return _request(req_id, shared + list(range(start, start + 6 * _BLOCK)))


def test_a_local_lookup_without_eagle_gives_one_junction():
    manager = _manager([full(_BLOCK), swa(_BLOCK, 64)])
    _serve(manager, _sibling("a", 1000))
    b = _sibling("b", 2000)
    _, hit, b.shared_prefix_boundary = manager.get_computed_blocks(b)
    assert (hit, b.shared_prefix_boundaries) == (0, (320,))


def test_a_local_lookup_with_eagle_gives_the_block_below_too():
    manager = _manager([full(_BLOCK), swa(_BLOCK, 64)], eagle=(1,))
    _serve(manager, _sibling("a", 1000))
    b = _sibling("b", 2000)
    _, hit, b.shared_prefix_boundary = manager.get_computed_blocks(b)
    assert (hit, b.shared_prefix_boundaries) == (0, (288, 320))


@pytest.mark.parametrize("eagle", [(), (1,)])
def test_the_third_sibling_hits_what_the_second_kept(eagle):
    manager = _manager([full(_BLOCK), swa(_BLOCK, 64)], eagle)
    _serve(manager, _sibling("a", 1000))
    assert _serve(manager, _sibling("b", 2000)) == 0
    expected = 288 if eagle else 320
    assert _serve(manager, _sibling("c", 3000)) == expected


def test_a_junction_from_the_store_is_kept_locally():
    """An instance that never saw A learns of the junction from the store."""
    manager = _manager([full(_BLOCK), swa(_BLOCK, 64)])
    assert _serve(manager, _sibling("b", 2000), store_junctions=(320,)) == 0
    assert _serve(manager, _sibling("c", 3000)) == 320


def test_several_junctions_are_kept_at_once():
    manager = _manager([full(_BLOCK), swa(_BLOCK, 64)])
    _serve(manager, _sibling("b", 2000), store_junctions=(128, 320))
    assert _serve(manager, _sibling("c", 3000, _SHARED[:130])) == 128
    assert _serve(manager, _sibling("d", 4000)) == 320


def test_an_engine_without_the_connector_stays_stock():
    manager = _manager([full(_BLOCK), swa(_BLOCK, 64)], eagle=(1,), enabled=False)
    _serve(manager, _sibling("a", 1000))
    b = _sibling("b", 2000)
    _, _, boundary = manager.get_computed_blocks(b)
    assert boundary == 320
    assert shared_prefix_boundaries(b) == ()


def test_a_mamba_state_at_a_store_junction_is_kept():
    manager = _manager([full(_BLOCK), mamba(_BLOCK)])
    b = _sibling("b", 2000)
    _, _, b.shared_prefix_boundary = manager.get_computed_blocks(b)
    set_junctions(b, store=(320,))
    # The scheduler ends a chunk at the junction, so the state there exists.
    manager.new_step_starts()
    manager.allocate_slots(b, 320)
    b.num_computed_tokens = 320
    manager.new_step_starts()
    manager.allocate_slots(b, b.num_tokens - 320)
    manager.free(b)
    manager.new_step_starts()
    _, hit, _ = manager.get_computed_blocks(_sibling("c", 3000))
    assert hit == 320


def test_a_mamba_state_elsewhere_is_not():
    manager = _manager([full(_BLOCK), mamba(_BLOCK)])
    b = _sibling("b", 2000)
    manager.allocate_slots(b, 320)
    b.num_computed_tokens = 320
    manager.new_step_starts()
    manager.allocate_slots(b, b.num_tokens - 320)
    manager.free(b)
    manager.new_step_starts()
    _, hit, _ = manager.get_computed_blocks(_sibling("c", 3000))
    assert hit == 0


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


def test_the_eagle_flag_is_that_of_dropping_groups():
    specs = [full(_BLOCK), swa(_BLOCK, 64)]
    assert drops_eagle_block(_manager(specs, eagle=(1,)).coordinator)
    assert not drops_eagle_block(_manager(specs).coordinator)

# SPDX-License-Identifier: Apache-2.0
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)

from tests.support import (
    coordinator,
    deepseek_v4_groups,
    full,
    groups,
    hashes,
    mamba,
    mla,
    swa,
)


def _pool(coord, block_hashes, tokens_by_group):
    """A store with these prefixes: every chunk of each group up to its tokens."""
    exists = set()
    for group_id, num_tokens in tokens_by_group.items():
        spec = coord.kv_cache_groups[group_id].kv_cache_spec
        chunk_hashes = coord.block_hashes_for_spec(block_hashes, spec)
        for chunk in range(num_tokens // spec.block_size):
            exists.add((group_id, bytes(chunk_hashes[chunk])))
    return ExternalCachedBlockPool(coord.hash_block_size, exists)


def _longest(coord, block_hashes, tokens_by_group):
    num_tokens = len(block_hashes) * coord.hash_block_size
    return coord.full_attention_hit(
        block_hashes,
        coord.align_lookup_length(num_tokens - 1),
        _pool(coord, block_hashes, tokens_by_group),
    )


def test_full_attention_alone_reaches_further_than_the_joint_hit():
    coord = coordinator(deepseek_v4_groups(), hash_block_size=4)
    block_hashes = hashes(1000)
    pool = _pool(coord, block_hashes, {0: 3840})
    _, joint = coord.find_longest_cache_hit(block_hashes, 3840, pool)
    assert joint == 0
    assert coord.full_attention_hit(block_hashes, 3840, pool) == 3840


def test_a_tail_beyond_full_attention_does_not_count():
    coord = coordinator(groups([full(32), swa(32, 64)]), hash_block_size=32)
    assert _longest(coord, hashes(10), {0: 64, 1: 224}) == 64


def test_of_several_full_attention_groups_the_longest_counts():
    coord = coordinator(groups([full(32), mla(32), swa(32, 64)]), hash_block_size=32)
    assert _longest(coord, hashes(10), {0: 64, 1: 224}) == 224


def test_without_full_attention_any_group_counts():
    coord = coordinator(groups([swa(32, 64), swa(32, 128)]), hash_block_size=32)
    assert _longest(coord, hashes(10), {0: 64, 1: 224}) == 224


def test_an_eagle_group_drops_its_proof_block():
    coord = coordinator(groups([full(32), swa(32, 64)], eagle=(0,)), 32)
    assert _longest(coord, hashes(10), {0: 128}) == 96


def test_an_eagle_group_may_prove_the_last_allowed_position_with_the_block_above():
    coord = coordinator(groups([full(32), swa(32, 64)], eagle=(0,)), 32)
    # 10 blocks: a hit may reach 288 at most, and block 10 proves it.
    assert _longest(coord, hashes(10), {0: 320}) == 288


def test_a_hit_never_covers_the_whole_request():
    coord = coordinator(groups([full(32), swa(32, 64)]), hash_block_size=32)
    assert _longest(coord, hashes(4), {0: 128}) == 96


def test_junctions_use_the_scheduler_block_and_the_eagle_flag():
    with_eagle = coordinator(deepseek_v4_groups(), hash_block_size=4)
    without = coordinator(deepseek_v4_groups(eagle=False), hash_block_size=4)
    assert with_eagle.junctions(0, 3840) == (3584, 3840)
    assert without.junctions(0, 3840) == (3840,)


def _kept_tokens(coord, masks, start_token=0):
    """Ends of the kept chunks by group, in tokens; None where all are kept."""
    kept = []
    for mask, group in zip(masks, coord.kv_cache_groups, strict=True):
        size = group.kv_cache_spec.block_size
        first = -(-start_token // size)
        kept.append(
            None
            if mask is None
            else [(first + i + 1) * size for i, keep in enumerate(mask) if keep]
        )
    return kept


def test_a_junction_tail_is_the_window_below_it():
    coord = coordinator(groups([full(32), swa(32, 64)]), hash_block_size=32)
    stock = _kept_tokens(coord, coord.store_mask(1024, 0, 1030))
    assert stock == [None, [992, 1024]]
    ours = _kept_tokens(coord, coord.store_mask(1024, 0, 1030, (512,)))
    assert ours == [None, [480, 512, 992, 1024]]


def test_an_eagle_tail_includes_the_proof_block_above():
    coord = coordinator(deepseek_v4_groups(), hash_block_size=4)
    masks = coord.store_mask(4352, 0, 4448, (3840,))
    kept = _kept_tokens(coord, masks)
    # Window 128 in blocks of 64: two below the position, and the proof block.
    assert [end for end in kept[2] if end < 4000] == [3776, 3840, 3904]
    # Not an EAGLE group: window 8 in blocks of 4.
    assert [end for end in kept[3] if end < 4000] == [3836, 3840]


def test_several_junctions_at_once():
    coord = coordinator(groups([full(32), swa(32, 64)]), hash_block_size=32)
    kept = _kept_tokens(coord, coord.store_mask(1024, 0, 1030, (256, 512)))
    assert kept[1] == [224, 256, 480, 512, 992, 1024]


def test_a_suffix_mask_is_the_tail_of_the_full_mask():
    coord = coordinator(groups([full(32), swa(32, 64)]), hash_block_size=32)
    whole = coord.store_mask(1024, 0, 1030, (512,))[1]
    assert coord.store_mask(1024, 496, 1030, (512,))[1] == whole[16:]


def test_a_junction_past_the_chunk_has_no_effect_yet():
    coord = coordinator(groups([full(32), swa(32, 64)]), hash_block_size=32)
    assert coord.store_mask(512, 0, 1030, (768,)) == coord.store_mask(512, 0, 1030)


def test_mamba_stays_out_of_the_positional_save():
    coord = coordinator(groups([full(32), mamba(32)]), hash_block_size=32)
    assert coord.store_mask(512, 0, 600, (256,)) == (None, [False] * 16)


def test_dense_retention_stays_dense():
    coord = coordinator(
        groups([full(32), swa(32, 64)]), hash_block_size=32, retention_interval=None
    )
    assert coord.store_mask(512, 0, 600, (256,)) == coord.store_mask(512, 0, 600)


def test_no_junction_is_the_stock_mask():
    coord = coordinator(deepseek_v4_groups(), hash_block_size=4)
    stock = MooncakeStoreCoordinator.store_mask(coord, 4352, 0, 4448)
    assert coord.store_mask(4352, 0, 4448, ()) == stock
    assert coord.store_mask(4352, 0, num_prompt_tokens=4448) == stock


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("position", [256, 512, 3584, 3840])
def test_a_promised_hit_finds_every_block_that_it_loads(eagle, position):
    """What the mask stores at a junction is what a lookup there needs."""
    coord = coordinator(deepseek_v4_groups(eagle), hash_block_size=4)
    block_hashes = hashes(1100)
    masks = coord.store_mask(4352, 0, 4400, (position,))
    exists = set()
    for group_id, mask in enumerate(masks):
        spec = coord.kv_cache_groups[group_id].kv_cache_spec
        chunk_hashes = coord.block_hashes_for_spec(block_hashes, spec)
        for chunk in range(4352 // spec.block_size):
            if mask is None or mask[chunk]:
                exists.add((group_id, bytes(chunk_hashes[chunk])))
    pool = ExternalCachedBlockPool(4, exists)
    # Capped below the replay tail; EAGLE may look one proof block further.
    _, hit = coord.find_longest_cache_hit(block_hashes, position, pool)
    assert hit == position

# SPDX-License-Identifier: Apache-2.0
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
)

from tests.support import (
    coordinator,
    full,
    groups,
    hashes,
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


def test_a_tail_beyond_full_attention_does_not_count():
    coord = coordinator(groups([full(32), swa(32, 64)]), hash_block_size=32)
    assert _longest(coord, hashes(10), {0: 64, 1: 224}) == 64


def test_of_several_full_attention_groups_the_longest_counts():
    coord = coordinator(groups([full(32), mla(32), swa(32, 64)]), hash_block_size=32)
    assert _longest(coord, hashes(10), {0: 64, 1: 224}) == 224


def test_without_full_attention_any_group_counts():
    coord = coordinator(groups([swa(32, 64), swa(32, 128)]), hash_block_size=32)
    assert _longest(coord, hashes(10), {0: 64, 1: 224}) == 224


def test_an_eagle_group_may_prove_the_last_allowed_position_with_the_block_above():
    coord = coordinator(groups([full(32), swa(32, 64)], eagle=(0,)), 32)
    # 10 blocks: a hit may reach 288 at most, and block 10 proves it.
    assert _longest(coord, hashes(10), {0: 320}) == 288

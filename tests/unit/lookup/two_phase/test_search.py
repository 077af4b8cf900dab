# SPDX-License-Identifier: Apache-2.0
"""What a two-phase lookup asks for; that it finds what stock finds is a law."""

import pytest

from tests.support import coordinator, deepseek_v4_groups, full, groups, hashes, swa
from vllm.junctions.lookup.two_phase.plan import LookupPlan
from vllm.junctions.lookup.two_phase.search import look_up

_TOKENS = 16_384


def _no_entries(*_args) -> tuple[()]:
    return ()


class Store:
    """A set of ``(group, hash unit)``, and what was asked of it, call by call."""

    def __init__(self, coord, num_ranks=1) -> None:
        self.coord = coord
        self.plan = LookupPlan(
            coord,
            [
                tuple(f"{group}:{rank}" for rank in range(num_ranks))
                for group in range(len(coord.kv_cache_groups))
            ],
        )
        self.units: set[tuple[int, int]] = set()
        self.lost_ranks: set[tuple[int, int, int]] = set()
        self.calls: list[list[tuple[int, int, int]]] = []

    def save(self, num_tokens, junctions=(), prompt_tokens=1) -> None:
        masks = self.coord.store_mask(num_tokens, 0, prompt_tokens, junctions)
        for group, mask in enumerate(masks):
            size = self.coord.kv_cache_groups[group].kv_cache_spec.block_size
            units = size // self.coord.hash_block_size
            self.units |= {
                (group, (index + 1) * units - 1)
                for index in range(num_tokens // size)
                if mask is None or mask[index]
            }

    def look_up(self, num_tokens=_TOKENS):
        block_hashes = hashes(num_tokens // self.coord.hash_block_size)
        units = {block_hash.hex(): i for i, block_hash in enumerate(block_hashes)}

        def ask(keys: list[str]) -> list[int]:
            call = []
            for key in keys:
                prefix, _, name = key.partition("@")
                group, _, rank = prefix.partition(":")
                call.append((int(group), units[name], int(rank)))
            self.calls.append(call)
            return [
                int((group, unit) in self.units and one not in self.lost_ranks)
                for one in call
                for group, unit, _ in [one]
            ]

        return look_up(self.plan, num_tokens, block_hashes, ask, _no_entries)


@pytest.fixture
def store() -> Store:
    return Store(coordinator(deepseek_v4_groups(), hash_block_size=4))


def test_a_full_hit_takes_one_call(store):
    store.save(_TOKENS, prompt_tokens=_TOKENS)
    found = store.look_up()
    assert found.hit_length == _TOKENS - 256
    assert found.lagging_group is None
    assert len(store.calls) == 1


def test_a_first_sibling_asks_for_one_key_a_position(store):
    store.save(_TOKENS // 2)
    found = store.look_up()
    assert (found.hit_length, found.longest_hit_length) == (0, _TOKENS // 2)
    assert found.lagging_group == 1
    keys = [one for call in store.calls for one in call]
    # 64 blocks of full attention, 63 pieces of evidence, the tail at the top.
    assert len(keys) == 64 + 63 + 24 - 1
    assert len(store.calls) == 1


def test_a_third_sibling_asks_for_the_tail_that_is_there(store):
    junctions = (_TOKENS // 2 - 512, _TOKENS // 2 - 256)
    store.save(_TOKENS // 2, junctions)
    found = store.look_up()
    assert found.hit_length == junctions[1]
    assert len(store.calls) == 2
    # Both junctions are in doubt: the whole tail of one, and of the other the tail
    # in the first group with evidence in the others.
    assert len(store.calls[1]) < 24 + 8


def test_a_key_of_another_rank_counts_too():
    store = Store(coordinator(groups([full(32), swa(32, 64)]), 32), num_ranks=2)
    store.save(1024, (1024,))
    assert store.look_up(1025).hit_length == 1024
    for rank in (0, 1):
        store.lost_ranks = {(1, 31, rank)}
        assert store.look_up(1025).hit_length == 0


def test_without_full_attention_the_longest_hit_is_that_of_any_group():
    """Also at a position that another group has just disproved."""
    store = Store(coordinator(groups([swa(32, 64), swa(32, 96)]), 32))
    # Group 0 has its tail at 512, group 1 at 256.
    store.units = {(0, 14), (0, 15), (1, 5), (1, 6), (1, 7)}
    found = store.look_up(1025)
    assert (found.hit_length, found.longest_hit_length) == (0, 512)


@pytest.mark.parametrize("unit", [14, 15])
def test_evidence_in_one_rank_namespace_is_no_tail(unit: int):
    """Below the top, a position is first asked about in one rank's namespace."""
    store = Store(coordinator(groups([full(32), swa(32, 64)]), 32), num_ranks=2)
    store.save(1024, (512,))
    assert store.look_up(1025).hit_length == 512
    store.lost_ranks = {(1, unit, 1)}
    assert store.look_up(1025).hit_length == 0


def test_evidence_is_asked_for_in_one_rank_namespace():
    store = Store(coordinator(groups([full(32), swa(32, 64)]), 32), num_ranks=8)
    store.save(1024)
    store.look_up(1025)
    asked = [one for call in store.calls for one in call if one[0] == 1]
    tail_at_the_top = [one for one in asked if one[1] in (30, 31)]
    assert len(tail_at_the_top) == 2 * 8
    assert {rank for _, unit, rank in asked if unit < 30} == {0}


def test_nothing_is_asked_for_that_would_prove_the_empty_prefix():
    """The one boundary is the prefix's end; EAGLE's drop leaves no hit but 0."""
    specs = groups([full(256), swa(64, 128)], eagle=[1])
    store = Store(coordinator(specs, hash_block_size=64))
    store.save(256, prompt_tokens=256)
    store.look_up(256)
    assert {group for call in store.calls for group, _, _ in call} == {0}

# SPDX-License-Identifier: Apache-2.0
import logging

import pytest
import torch
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from tests.support import coordinator, deepseek_v4_groups, full, groups, mamba, swa
from vllm.junctions.lookup.two_phase.plan import LookupPlan, plan_lookups


def _prefixes(coord) -> list[tuple[str, ...]]:
    return [(f"group:{index}",) for index in range(len(coord.kv_cache_groups))]


def _plan(coord) -> LookupPlan:
    return LookupPlan(coord, _prefixes(coord))


def _chunked() -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=32,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        attention_chunk_size=64,
    )


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([full(32), _chunked()], "group 1 is of ChunkedLocalAttentionManager"),
        ([full(32), swa(32, 1)], "group 1 has a window of one token"),
    ],
)
def test_a_layout_of_which_nothing_is_proved_keeps_one_phase_and_says_so(
    specs, reason, caplog
):
    coord = coordinator(groups(specs), hash_block_size=32)
    with caplog.at_level(logging.WARNING, "vllm.junctions.lookup.two_phase.plan"):
        assert plan_lookups(coord, _prefixes(coord)) is None
    assert reason in caplog.text
    with pytest.raises(ValueError, match=reason):
        _plan(coord)


@pytest.mark.parametrize(
    "specs", [[full(32)], [swa(32, 64)], [full(32), mamba(32)], [full(32), swa(32, 64)]]
)
def test_layouts_of_known_groups_have_a_plan(specs):
    coord = coordinator(groups(specs), hash_block_size=32)
    assert plan_lookups(coord, _prefixes(coord)) is not None


def test_calls_are_bounded_by_a_constant_and_a_logarithm():
    plan = _plan(coordinator(deepseek_v4_groups(), hash_block_size=4))
    bounds = [plan.max_rpcs(tokens) for tokens in (4096, 131_072, 1 << 20, 1 << 23)]
    # Eight times the positions are one batch of tails more, and past 131,072 tokens
    # one of full attention.
    assert bounds == [7, 8, 10, 12]


def test_the_plan_leaves_the_coordinator_as_it_was():
    coord = coordinator(deepseek_v4_groups(), hash_block_size=4)
    managers = [group.manager_cls for group in coord.attention_groups]
    plan = _plan(coord)
    assert [group.manager_cls for group in coord.attention_groups] == managers
    assert plan.search is not coord


@pytest.mark.parametrize(
    ("specs", "eagle", "skips"),
    [
        ([full(32), swa(32, 64), swa(16, 32)], (), True),
        ([full(32), swa(32, 64), swa(16, 32)], (2,), True),
        # Which of two proofs was checked last decides.
        ([full(32), swa(32, 64), swa(16, 32)], (1, 2), False),
        # A window of more than a scheduler block, in smaller blocks.
        ([full(32), swa(32, 64), swa(16, 64)], (2,), False),
    ],
)
def test_positions_are_skipped_only_where_order_does_not_matter(specs, eagle, skips):
    coord = coordinator(groups(specs, eagle), hash_block_size=16)
    assert _plan(coord).skips_positions is skips

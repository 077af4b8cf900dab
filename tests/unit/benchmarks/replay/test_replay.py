# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest

from benchmarks.replay.layouts import LAYOUTS, ModelLayout
from benchmarks.replay.policies import Policy, policies
from benchmarks.replay.replay import Cluster, Outcome, Replay
from benchmarks.replay.trace import TraceRequest, number_prompts, read_trace
from tests.unit.benchmarks.replay import layouts
from tests.unit.benchmarks.replay.layouts import (
    SMALL_LAYOUTS,
    random_trace,
    small_layout,
)
from tests.unit.benchmarks.replay.reuse import Reuse

FULL_SWA = SMALL_LAYOUTS["one block size"]


def replay(
    policy: Policy,
    layout: ModelLayout,
    trace: list[TraceRequest],
    cluster: Cluster | None = None,
) -> Outcome:
    prompts = number_prompts(trace, layout.hash_tokens)
    return Replay(policy, layout, prompts, cluster or Cluster()).run()


def policies_of(layout: ModelLayout) -> dict[str, Policy]:
    block = layout.scheduler_block_tokens
    return {policy.name: policy for policy in policies([8 * block], block)}


def by_definition(layout: ModelLayout) -> dict[str, Reuse]:
    """The same policies, by the definition of reuse."""
    block = layout.scheduler_block_tokens
    full_groups = tuple(
        layout.layers_by_group[index] for index in layout.full_attention_group_ids
    )
    ceiling = ModelLayout("full", "", (*full_groups, *_sized(block)))
    return {
        "ceiling": Reuse(ceiling),
        "dense": Reuse(layout, interval=block),
        "stock": Reuse(layout),
        "junctions": Reuse(layout, junctions=True),
        f"every-{8 * block}": Reuse(layout, interval=8 * block),
        f"junctions+every-{8 * block}": Reuse(
            layout, junctions=True, interval=8 * block
        ),
    }


def _sized(block: int):
    """A full-attention group that keeps the scheduler's block as large as it was."""
    return small_layout((block, 0)).layers_by_group


def assert_agrees(
    layout: ModelLayout, trace: list[TraceRequest], name: str, policy: Policy
) -> Outcome:
    reuse = by_definition(layout)[name]
    expected = [reuse.serve(request) for request in trace]
    outcome = replay(policy, layout, trace)
    assert outcome.hit_tokens == expected
    assert outcome.store_hit_tokens == expected
    if name != "ceiling":
        assert outcome.num_stored == outcome.num_puts == len(reuse.stored)
        full_ids = layout.full_attention_group_ids
        tails = [key for key in reuse.stored if key[0] not in full_ids]
        assert outcome.num_tail_puts == len(tails)
    return outcome


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["ceiling", "dense", "stock", "junctions", "every"])
@pytest.mark.parametrize("layout", SMALL_LAYOUTS.values(), ids=SMALL_LAYOUTS)
def test_hits_and_puts_follow_from_the_definition_of_reuse(layout, name, seed):
    policy = next(p for n, p in policies_of(layout).items() if n.startswith(name))
    outcome = assert_agrees(layout, random_trace(seed), policy.name, policy)
    assert sum(outcome.hit_tokens) > 0


@pytest.mark.skipif("TRACE" not in os.environ, reason="TRACE names no trace")
@pytest.mark.parametrize("name", ["ceiling", "stock", "junctions"])
@pytest.mark.parametrize("layout", ["deepseek-v4-flash", "deepseek-v4-flash-no-mtp"])
def test_a_whole_trace_follows_from_the_definition_of_reuse(layout, name):
    trace = read_trace(Path(os.environ["TRACE"]))
    policy = policies_of(LAYOUTS[layout])[name]
    assert_agrees(LAYOUTS[layout], trace, name, policy)


# Two siblings of four trace blocks each that share two, and repeats of them.
FIRST = layouts.request(2048, 1, 2, 3, 4)
SECOND = layouts.request(2048, 1, 2, 5, 6)
THIRD = layouts.request(2048, 1, 2, 7, 8)


def hits(name: str, trace: list[TraceRequest], cluster: Cluster) -> tuple:
    """Local and store hits by request, in tokens."""
    outcome = replay(policies_of(FULL_SWA)[name], FULL_SWA, trace, cluster)
    from_store = outcome.store_hit_tokens
    local = [
        hit - loaded for hit, loaded in zip(outcome.hit_tokens, from_store, strict=True)
    ]
    return local, from_store


def test_the_same_instance_hits_locally_and_another_one_the_store():
    trace = [FIRST, FIRST, FIRST]
    local, from_store = hits("stock", trace, Cluster(2, local_blocks=1000))
    # In turn: the first instance, the second, the first again.
    assert local == [0, 0, 1984]
    assert from_store == [0, 1984, 0]


def test_a_sticky_router_keeps_prompts_that_begin_alike_together():
    other = layouts.request(2048, 11, 12, 13, 14)
    trace = [FIRST, other, FIRST, other]
    cluster = Cluster(2, "sticky", local_blocks=1000)
    assert hits("stock", trace, cluster) == ([0, 0, 1984, 1984], [0, 0, 0, 0])


def test_a_junction_found_locally_is_kept_locally_and_only_ours_stores_it():
    # All on the first instance, but for the last one.
    trace = [FIRST, FIRST, SECOND, FIRST, THIRD, THIRD]
    cluster = Cluster(2, local_blocks=1000)
    alone = [trace[0], trace[2], trace[4]]
    assert hits("stock", alone, Cluster(1, local_blocks=1000))[0] == [0, 0, 1024]
    local, from_store = hits("stock", trace, cluster)
    assert (local[4], from_store[4]) == (1024, 0)
    parted = [FIRST, FIRST, SECOND, THIRD]
    assert hits("stock", parted, cluster)[1][3] == 0
    assert hits("junctions", parted, cluster)[1][3] == 1024


def test_a_small_local_cache_forgets():
    others = [layouts.request(2048, *range(10 * n, 10 * n + 4)) for n in range(1, 9)]
    trace = [FIRST, *others, FIRST]
    assert hits("stock", trace, Cluster(local_blocks=1000))[0][-1] == 1984
    local, from_store = hits("stock", trace, Cluster(local_blocks=70))
    assert (local[-1], from_store[-1]) == (0, 1984)


def test_a_store_that_is_large_enough_is_as_good_as_one_without_bound():
    trace, policy = random_trace(0), policies_of(FULL_SWA)["junctions"]
    unbounded = replay(policy, FULL_SWA, trace)
    enough = replay(policy, FULL_SWA, trace, Cluster(store_blocks=unbounded.num_stored))
    assert enough == unbounded


def test_a_store_keeps_within_its_bound_and_loses_hits():
    trace, policy = random_trace(0), policies_of(FULL_SWA)["dense"]
    unbounded = replay(policy, FULL_SWA, trace)
    small = replay(policy, FULL_SWA, trace, Cluster(store_blocks=200))
    assert small.num_stored == 200
    assert small.num_puts == small.num_stored + small.num_evicted
    assert 0 < sum(small.hit_tokens) < sum(unbounded.hit_tokens)


def test_lookup_keys_are_what_the_lookup_mask_names():
    trace = [layouts.request(700, 1, 2)]
    layout = SMALL_LAYOUTS["drafter"]
    outcome = replay(policies_of(layout)["stock"], layout, trace)
    # 640 tokens: 5 blocks of 128, and of each of them two tail blocks of 32 and the
    # proof block above, which the last one lacks.
    assert outcome.num_lookup_keys == 5 + 5 * 3 - 1


@pytest.mark.parametrize("layout", SMALL_LAYOUTS.values(), ids=SMALL_LAYOUTS)
def test_what_searches_leave_out_changes_nothing(layout, monkeypatch):
    """Searches stop where nothing is cached: faster, and no answer differs."""
    trace = random_trace(3)
    policy = policies_of(layout)["junctions"]
    cluster = Cluster(3, local_blocks=150, store_blocks=400)
    expected = replay(policy, layout, trace, cluster)
    assert expected.num_junction_requests
    assert any(expected.store_hit_tokens)
    monkeypatch.setattr(Replay, "_within_reach", lambda _self, tokens, _answers: tokens)
    assert replay(policy, layout, trace, cluster) == expected


def test_blocks_that_do_not_divide_the_trace_blocks_are_refused():
    layout = small_layout((1024, 0), (64, 128))
    with pytest.raises(ValueError, match="1024 tokens do not divide the trace's, 512"):
        replay(Policy("stock", ""), layout, [FIRST])

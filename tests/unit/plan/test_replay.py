# SPDX-License-Identifier: Apache-2.0
"""Hits and puts are those of real coordinators."""

import pytest

from tests.unit.plan import layouts
from tests.unit.plan.layouts import (
    SMALL_LAYOUTS,
    layout_of,
    prompts_of,
    random_trace,
    small_layout,
)
from tests.unit.plan.reference import replay as reference
from tests.unit.plan.reference.models import LAYOUTS, ModelLayout
from tests.unit.plan.reference.trace import number_prompts
from vllm.junctions.plan.cluster import Cluster, Outcome, Served
from vllm.junctions.plan.policies import Policy, policies
from vllm.junctions.plan.replay import Replay
from vllm.junctions.plan.shape import LayoutError, Shape
from vllm.junctions.plan.trace import TraceRequest
from vllm.junctions.record.format import GroupLayout, Layout

FULL_SWA = SMALL_LAYOUTS["one block size"]
MORE_LAYOUTS = SMALL_LAYOUTS | {
    "the drafter is full attention": small_layout(
        (32, 0), (32, 64), (32, 0), eagle=frozenset({2})
    ),
    "all full attention drops": small_layout((64, 0), (32, 64), eagle=frozenset({0})),
}


def policies_of(layout: ModelLayout, predicted=()) -> list[Policy]:
    block = layout.scheduler_block_tokens
    return policies([8 * block], block, predicted)


def run(
    layout: ModelLayout,
    trace: list[TraceRequest],
    cluster: Cluster | None = None,
    predicted=(),
) -> tuple[list[Served], dict[str, Outcome]]:
    described = layout_of(layout)
    todo = policies_of(layout, predicted)
    replay = Replay(todo, described, cluster)
    served = [replay.serve(prompt) for prompt in prompts_of(trace, described)]
    outcomes = replay.finish()
    names = [policy.name for policy in todo]
    return served, dict(zip(names, outcomes, strict=True))


@pytest.mark.parametrize("local_blocks", [0, 100_000])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", MORE_LAYOUTS.values(), ids=MORE_LAYOUTS)
def test_hits_and_puts_are_those_of_real_coordinators(layout, seed, local_blocks):
    """Predicted tails too, where one instance learns."""
    num_instances, predicted = (2, ()) if local_blocks else (1, (1, 2))
    trace = random_trace(seed)
    cluster = Cluster(num_instances, local_blocks=local_blocks)
    served, outcomes = run(layout, trace, cluster, predicted)
    prompts = number_prompts(trace, layout.hash_tokens)
    for index, policy in enumerate(policies_of(layout, predicted)):
        expected = reference.Replay(
            policy,
            layout,
            prompts,
            reference.Cluster(num_instances, local_blocks=local_blocks),
        ).run()
        assert [one.hit_tokens[index] for one in served] == expected.hit_tokens
        outcome = outcomes[policy.name]
        if not policy.full_attention_only:
            assert outcome.num_puts == expected.num_puts
            assert outcome.num_tail_puts == expected.num_tail_puts
            assert outcome.num_junction_requests == expected.num_junction_requests
            assert outcome.num_predicted_tails == expected.num_predicted_tails
            assert outcome.num_predicted_served == expected.num_predicted_served
        if policy.retention_interval == 0 and not policy.full_attention_only:
            from_store = [one.store_hit_tokens[index] for one in served]
            assert from_store == expected.store_hit_tokens


def test_with_long_windows_and_a_drafter_puts_are_near_those_of_coordinators():
    """Where two tails overlap, a proof block is counted that another tail covers."""
    layout = small_layout((64, 0), (64, 300), eagle=frozenset({1}))
    for seed in range(4):
        trace = random_trace(seed)
        served, outcomes = run(layout, trace)
        prompts = number_prompts(trace, layout.hash_tokens)
        for index, policy in enumerate(policies_of(layout)):
            if policy.full_attention_only:
                continue
            expected = reference.Replay(
                policy, layout, prompts, reference.Cluster()
            ).run()
            assert [one.hit_tokens[index] for one in served] == expected.hit_tokens
            assert outcomes[policy.name].num_puts == pytest.approx(
                expected.num_puts, rel=0.06
            )


# Two siblings of four trace blocks each that share two, and repeats of them.
FIRST = layouts.request(2048, 1, 2, 3, 4)
SECOND = layouts.request(2048, 1, 2, 5, 6)
THIRD = layouts.request(2048, 1, 2, 7, 8)


def hits(name: str, trace: list[TraceRequest], cluster: Cluster) -> tuple:
    """Local and store hits by request, in tokens."""
    served, outcomes = run(FULL_SWA, trace, cluster)
    index = list(outcomes).index(name)
    from_store = [one.store_hit_tokens[index] for one in served]
    local = [one.hit_tokens[index] - one.store_hit_tokens[index] for one in served]
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
    trace = random_trace(0)
    served, outcomes = run(FULL_SWA, trace)
    enough = Cluster(store_blocks=max(one.num_stored for one in outcomes.values()))
    again, bounded = run(FULL_SWA, trace, enough)
    assert again == served
    assert bounded == outcomes


def test_a_store_keeps_within_its_bound_and_loses_hits():
    trace = random_trace(0)
    _, unbounded = run(FULL_SWA, trace)
    _, small = run(FULL_SWA, trace, Cluster(store_blocks=200))
    for name, outcome in small.items():
        assert outcome.num_stored <= 200
        assert outcome.num_puts == outcome.num_stored + outcome.num_evicted
        assert outcome.hit_tokens <= unbounded[name].hit_tokens
    assert 0 < small["dense"].hit_tokens < unbounded["dense"].hit_tokens


def test_a_bounded_store_forgets_about_what_one_that_goes_by_blocks_does():
    trace = random_trace(1, num_requests=200)
    served, _ = run(FULL_SWA, trace, Cluster(store_blocks=400))
    prompts = number_prompts(trace, FULL_SWA.hash_tokens)
    for index, policy in enumerate(policies_of(FULL_SWA)):
        if policy.full_attention_only:
            continue
        expected = reference.Replay(
            policy, FULL_SWA, prompts, reference.Cluster(store_blocks=400)
        ).run()
        got = sum(one.hit_tokens[index] for one in served)
        assert got == pytest.approx(sum(expected.hit_tokens), rel=0.1)


def test_what_is_too_much_to_remember_is_forgotten_and_counted():
    described = layout_of(FULL_SWA)
    replay = Replay(policies([], 64), described, Cluster(max_units=200))
    for prompt in prompts_of(random_trace(0), described):
        replay.serve(prompt)
    assert replay.num_forgotten_tokens > 0
    _, everything = run(FULL_SWA, random_trace(0))
    assert 0 < replay.outcomes[0].hit_tokens < everything["ceiling"].hit_tokens


def test_what_a_request_leaves_is_there_once_it_has_its_first_token():
    described = layout_of(FULL_SWA)
    early, late = (
        [
            prompt.__class__(
                prompt.num_tokens, prompt.ids, looked_up_ms=at, stored_ms=at + 100
            )
            for prompt, at in zip(
                prompts_of([FIRST, FIRST], described), times, strict=True
            )
        ]
        for times in ((0, 99), (0, 100))
    )
    for prompts, expected in ((early, 0), (late, 1984)):
        replay = Replay(policies([], 64), described)
        replay.serve(prompts[0])
        assert replay.serve(prompts[1]).hit_tokens[1:] == [expected] * 3


def test_lookup_keys_are_what_the_lookup_mask_names():
    # 640 tokens: 5 blocks of 128, and of each of them two tail blocks of 32 and the
    # proof block above, which the last one lacks.
    shape = Shape(layout_of(SMALL_LAYOUTS["drafter"]))
    assert shape.lookup_keys(700) == 5 + 5 * 3 - 1


def test_deepseek_v4s_layout_gives_what_coordinators_give():
    trace = random_trace(5, num_requests=40)
    layout = LAYOUTS["deepseek-v4-flash"]
    served, _ = run(layout, trace)
    prompts = number_prompts(trace, layout.hash_tokens)
    for index, policy in enumerate(policies_of(layout)):
        expected = reference.Replay(policy, layout, prompts, reference.Cluster()).run()
        assert [one.hit_tokens[index] for one in served] == expected.hit_tokens


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((GroupLayout("full", 16), GroupLayout("state", 16)), "recurrent states"),
        ((GroupLayout("window", 16, 64),), "no full attention"),
    ],
)
def test_a_layout_that_cannot_be_planned_for_says_why(groups, message):
    layout = Layout(
        name="m", groups=groups, scheduler_block_tokens=16, hash_block_tokens=16
    )
    with pytest.raises(LayoutError, match=message):
        Replay(policies([], 16), layout)

# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from benchmarks.replay.traffic import TRAFFIC, make_traffic, number_texts
from tests.unit.plan.layouts import layout_of, small_layout
from vllm.junctions.plan.policies import policies
from vllm.junctions.plan.replay import Replay

LAYOUT = small_layout((32, 0), (32, 64))
POLICIES = policies([], 32, [1])
NAMES = [policy.name for policy in POLICIES]


def run(prompts, layout=LAYOUT):
    """Return each prompt's hits, and what became of all, by policy."""
    replay = Replay(POLICIES, layout_of(layout))
    served = [replay.serve(prompt) for prompt in prompts]
    hits = {
        name: [one.hit_tokens[index] for one in served]
        for index, name in enumerate(NAMES)
    }
    return hits, dict(zip(NAMES, replay.finish(), strict=True))


def test_texts_share_units_up_to_where_they_part():
    texts = [[(1, 700), (2, 100)], [(1, 700), (3, 100)], [(1, 600), (4, 90)]]
    first, second, third = number_texts(texts, 4)
    assert [prompt.num_tokens for prompt in (first, second, third)] == [800, 800, 690]
    same = first.ids == second.ids
    assert same[: 700 // 4].all()
    assert not same[700 // 4 :].any()
    same = second.ids[: len(third.ids)] == third.ids
    assert same[: 600 // 4].all()
    assert not same[600 // 4 :].any()


@pytest.mark.parametrize("kind", TRAFFIC)
def test_the_same_seed_makes_the_same_prompts(kind):
    first, again = (make_traffic(kind, 64, 40) for _ in range(2))
    other = make_traffic(kind, 64, 40, seed=1)
    assert len(first) >= 40 // len(TRAFFIC) * (len(TRAFFIC) - 1)
    for prompt, same in zip(first, again, strict=True):
        assert np.array_equal(prompt.ids, same.ids)
    assert sum(p.num_tokens for p in first) != sum(p.num_tokens for p in other)


def test_documents_gain_and_unrelated_prompts_pay_nothing():
    documents = make_traffic("documents", 32, 400)
    _, outcomes = run(documents)
    dense, junctions, predicted = (
        outcomes[name].hit_tokens
        for name in ("dense", "junctions", "junctions+predict-1")
    )
    # Most of what junctions leave.
    assert dense - predicted < (dense - junctions) / 2
    _, unrelated = run(make_traffic("unrelated", 32, 200))
    assert unrelated["junctions+predict-1"].num_predicted_tails == 0


def run_less_and_less(num_shared_tokens, eagle, num_series=1):
    """Return what 16 siblings of the last series share, and hit by policy."""
    shared = [num_shared_tokens - 32 * index for index in range(16)]
    texts = [
        [(1000 * series, tokens), (1000 * series + 1 + index, 250)]
        for series in range(num_series)
        for index, tokens in enumerate(shared)
    ]
    layout = small_layout((32, 0), (32, 64), eagle=eagle)
    hits, _ = run(number_texts(texts, 32), layout)
    return shared, {name: found[-len(shared) :] for name, found in hits.items()}


def num_below(hits, shared, least_share=0.8):
    """Return how many hit less than they should, from the fourth sibling on."""
    pairs = list(zip(hits["junctions+predict-1"], shared, strict=True))[4:]
    return sum(hit < least_share * tokens for hit, tokens in pairs)


EAGLE = pytest.mark.parametrize("eagle", [frozenset(), frozenset({1})])


@EAGLE
@pytest.mark.parametrize("num_shared_tokens", [3424, 3840, 8000])
def test_siblings_that_share_less_and_less_hit_from_the_fourth_on(
    num_shared_tokens, eagle
):
    shared, hits = run_less_and_less(num_shared_tokens, eagle)
    for name in ("stock", "junctions"):
        assert not any(hits[name])
    assert not num_below(hits, shared)


@EAGLE
def test_those_that_share_little_do_once_others_like_them_were_seen(eagle):
    """That the first such series goes on so is not known: its tails lie high."""
    shared, hits = run_less_and_less(2400, eagle)
    assert num_below(hits, shared) == 1
    shared, hits = run_less_and_less(2400, eagle, num_series=8)
    assert not num_below(hits, shared)

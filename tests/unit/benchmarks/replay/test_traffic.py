# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from benchmarks.replay.policies import Policy, policies
from benchmarks.replay.replay import Cluster, Outcome, Replay
from benchmarks.replay.traffic import TRAFFIC, make_traffic, number_texts
from tests.unit.benchmarks.replay.layouts import small_layout

LAYOUT = small_layout((32, 0), (32, 64))
POLICIES = {policy.name: policy for policy in policies([], 32, [1])}


def run(prompts, policy: Policy, layout=LAYOUT) -> Outcome:
    return Replay(policy, layout, prompts, Cluster()).run()


def test_texts_share_units_up_to_where_they_part():
    texts = [[(1, 700), (2, 100)], [(1, 700), (3, 100)], [(1, 600), (4, 90)]]
    first, second, third = number_texts(texts, 4).prompts
    assert [prompt.num_tokens for prompt in (first, second, third)] == [800, 800, 690]
    same = first.units == second.units
    assert same[: 700 // 4].all()
    assert not same[700 // 4 :].any()
    same = second.units[: len(third.units)] == third.units
    assert same[: 600 // 4].all()
    assert not same[600 // 4 :].any()


@pytest.mark.parametrize("kind", TRAFFIC)
def test_the_same_seed_makes_the_same_prompts(kind):
    first, again = (make_traffic(kind, 64, 40) for _ in range(2))
    other = make_traffic(kind, 64, 40, seed=1)
    assert len(first.prompts) >= 40 // len(TRAFFIC) * (len(TRAFFIC) - 1)
    for prompt, same in zip(first.prompts, again.prompts, strict=True):
        assert np.array_equal(prompt.units, same.units)
    assert first.num_tokens != other.num_tokens


def test_documents_gain_and_unrelated_prompts_pay_nothing():
    documents = make_traffic("documents", 32, 400)
    outcomes = {name: run(documents, policy) for name, policy in POLICIES.items()}
    dense, junctions, predicted = (
        sum(outcomes[name].hit_tokens)
        for name in ("dense", "junctions", "junctions+predict-1")
    )
    # Most of what junctions leave.
    assert dense - predicted < (dense - junctions) / 2
    unrelated = run(make_traffic("unrelated", 32, 200), POLICIES["junctions+predict-1"])
    assert unrelated.num_predicted_tails == 0


@pytest.mark.parametrize("eagle", [frozenset(), frozenset({1})])
@pytest.mark.parametrize("num_shared_tokens", [3840, 8000])
def test_siblings_that_share_less_and_less_hit_from_the_fourth_on(
    num_shared_tokens, eagle
):
    shared = [num_shared_tokens - 32 * index for index in range(16)]
    texts = [[(1, tokens), (10 + index, 250)] for index, tokens in enumerate(shared)]
    prompts = number_texts(texts, 32)
    layout = small_layout((32, 0), (32, 64), eagle=eagle)
    for name in ("stock", "junctions"):
        assert not any(run(prompts, POLICIES[name], layout).hit_tokens)
    outcome = run(prompts, POLICIES["junctions+predict-1"], layout)
    for hit, tokens in list(zip(outcome.hit_tokens, shared, strict=True))[4:]:
        assert hit >= 0.8 * tokens

# SPDX-License-Identifier: Apache-2.0
"""Two servers on one store: what one leaves there, the other hits."""

from tests.e2e.client import ask, random_prompts, reset_local_cache

_SHARED = 3848  # the last block boundary (32 tokens) is 3840


def test_a_fresh_instance_hits_the_junction_from_the_store(trio):
    a, b, c = random_prompts("fresh", _SHARED, 1400, 600, 607)
    one, two = trio["one"], trio["two"]
    assert ask(one, a).store_hit_tokens == 0
    reset_local_cache(one)
    assert ask(one, b).store_hit_tokens == 0
    reset_local_cache(one)
    answer = ask(two, c)
    assert (answer.local_hit_tokens, answer.store_hit_tokens) == (0, 3840)


def test_where_an_instance_finds_the_junction_its_next_sibling_hits_locally(trio):
    a, b, c = random_prompts("finder", _SHARED, 1400, 600, 607)
    one, two = trio["one"], trio["two"]
    ask(one, a)
    reset_local_cache(one)
    assert ask(two, b).store_hit_tokens == 0
    answer = ask(two, c)
    assert (answer.local_hit_tokens, answer.store_hit_tokens) == (3840, 0)


def test_a_junction_that_only_the_local_cache_found_reaches_the_store(trio):
    """B never asks the store for more than it knows: its sibling is local."""
    a, b, c = random_prompts("local", _SHARED, 1400, 600, 607)
    one, two = trio["one"], trio["two"]
    ask(one, a)
    ask(one, b)
    reset_local_cache(one)
    assert ask(two, c).store_hit_tokens == 3840


def test_the_replay_of_a_prompt_hits_as_before(trio):
    (a,) = random_prompts("replay", _SHARED, 1400)
    one, two = trio["one"], trio["two"]
    ask(one, a)
    reset_local_cache(one)
    assert ask(two, a).store_hit_tokens == (len(a) - 1) // 32 * 32

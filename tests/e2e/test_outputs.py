# SPDX-License-Identifier: Apache-2.0
"""A sibling that loads its prefix answers as a cold server does, in float32."""

import pytest

from testbed.store import StoreClient
from tests.e2e.client import Answer, ask, random_prompts, reset_local_cache
from tests.e2e.keys import block_hashes, group_of

_BLOCK = 32
_JUNCTION = 3840
_TOLERANCE = 1e-3


def _same(answer: Answer, other: Answer) -> bool:
    return answer.token_ids == other.token_ids and answer.logprobs == pytest.approx(
        other.logprobs, abs=_TOLERANCE
    )


def _store_siblings(trio, seed: str) -> list[int]:
    """Let one server store A and B; return the prompt of a third sibling.

    It ends within the window above the junction, so that what it generates reads
    the stored tail at first hand.
    """
    a, b, c = random_prompts(seed, _JUNCTION + 8, 1400, 600, 10)
    for prompt in (a, b):
        ask(trio["one"], prompt)
        reset_local_cache(trio["one"])
    return c


@pytest.mark.parametrize("seed", ["out-1", "out-2", "out-3"])
def test_a_loaded_sibling_answers_as_a_cold_server(trio, seed):
    sibling = _store_siblings(trio, seed)
    loaded = ask(trio["two"], sibling)
    assert loaded.store_hit_tokens == _JUNCTION
    assert _same(loaded, ask(trio["cold"], sibling))


def test_one_corrupted_tail_block_shows_in_the_answer(trio, shared_master, monkeypatch):
    """The comparison above can fail: wrong bytes in one tail, other answer."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    sibling = _store_siblings(trio, "corrupted")
    suffix = "@" + block_hashes(sibling, _BLOCK)[_JUNCTION // _BLOCK - 1]
    with StoreClient(shared_master) as client:
        keys = shared_master.keys()
        counts = {}
        for key in keys:
            counts[group_of(key)] = counts.get(group_of(key), 0) + 1
        full_attention = max(counts, key=counts.get)
        tails = [
            key
            for key in keys
            if key.endswith(suffix) and group_of(key) != full_attention
        ]
        assert tails, "the junction's tail is not in the store"
        client.overwrite(tails[0], bytes(len(client.get(tails[0]))))
        loaded = ask(trio["two"], sibling)
    assert loaded.store_hit_tokens == _JUNCTION
    assert not _same(loaded, ask(trio["cold"], sibling))

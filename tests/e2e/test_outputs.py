# SPDX-License-Identifier: Apache-2.0
"""A sibling that loads its prefix answers as a cold server does, in float32."""

import os

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from benchmarks.testbed.store import StoreClient
from tests.e2e.client import Answer, ask, random_prompts, reset_local_cache

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


def _hash_of_last_shared_block(prompt: list[int]) -> str:
    """Hash that keys the block ending at the junction, as servers compute it."""
    hash_fn = get_hash_fn_by_name("sha256")
    assert os.environ["PYTHONHASHSEED"] == "0"
    init_none_hash(hash_fn)
    request = Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(_BLOCK, hash_fn),
    )
    return request.block_hashes[_JUNCTION // _BLOCK - 1].hex()


def _group(key: str) -> str:
    return key.split("@group:")[1].split("@")[0]


def test_one_corrupted_tail_block_shows_in_the_answer(trio, shared_master, monkeypatch):
    """The comparison above can fail: wrong bytes in one tail, other answer."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    sibling = _store_siblings(trio, "corrupted")
    suffix = "@" + _hash_of_last_shared_block(sibling)
    with StoreClient(shared_master) as client:
        keys = shared_master.keys()
        counts = {}
        for key in keys:
            counts[_group(key)] = counts.get(_group(key), 0) + 1
        full_attention = max(counts, key=counts.get)
        tails = [
            key
            for key in keys
            if key.endswith(suffix) and _group(key) != full_attention
        ]
        assert tails, "the junction's tail is not in the store"
        client.overwrite(tails[0], bytes(len(client.get(tails[0]))))
        loaded = ask(trio["two"], sibling)
    assert loaded.store_hit_tokens == _JUNCTION
    assert not _same(loaded, ask(trio["cold"], sibling))

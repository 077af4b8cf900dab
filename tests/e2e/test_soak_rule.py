# SPDX-License-Identifier: Apache-2.0
"""What a soak rests on: its rule catches wrong KV."""

import httpx
import pytest

from benchmarks.soak.outputs import (
    LOGPROB_TOLERANCE,
    cold_body,
    cold_candidates,
    logprob_error,
)
from testbed.server import VllmServer
from testbed.store import StoreClient
from tests.e2e.client import ask, random_prompts, reset_local_cache
from tests.e2e.keys import block_hashes, group_of

_BLOCK = 32
_JUNCTION = 1600
_BLOCKS_OF_PREFIX = _JUNCTION // _BLOCK


def _error_of(server: VllmServer, cold: VllmServer, prompt: list[int]) -> float:
    """Let ``server`` answer from the store, and ``cold`` judge it, as a soak does."""
    answer = ask(server, prompt, max_tokens=12)
    assert answer.store_hit_tokens == _JUNCTION
    reset_local_cache(server)
    reply = httpx.post(
        f"{cold.base_url}/v1/completions",
        json=cold_body(cold.model, prompt, answer.token_ids),
        timeout=300,
    )
    candidates = cold_candidates(reply.raise_for_status(), len(answer.token_ids))
    return logprob_error(answer.token_ids, answer.logprobs, candidates)


@pytest.mark.slow
def test_the_rule_tells_one_wrong_block_from_right_ones(
    trio, shared_master, monkeypatch
):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    # What a wrong block in a window changes is passed on from layer to layer, and
    # weaker with each token: a soak's tails are 1 to 220 tokens, most hits have both.
    short, any_tail = range(10, 90, 10), range(10, 200, 16)
    a, b, *siblings = random_prompts(
        "soak-rule", _JUNCTION + 8, 700, 600, *any_tail, *reversed(short)
    )
    for prompt in (a, b):
        ask(trio["one"], prompt)
        reset_local_cache(trio["one"])
    shared_master.wait_until_still()
    hashes = block_hashes(a, _BLOCK)[:_BLOCKS_OF_PREFIX]
    places = {block_hash: place for place, block_hash in enumerate(hashes)}
    by_group: dict[str, dict[int, str]] = {}
    for key in sorted(shared_master.keys()):
        place = places.get(key.split("@")[-1])
        if place is not None:
            by_group.setdefault(group_of(key), {})[place] = key
    # The full-attention group has them all, the others the tail at the junction.
    assert len(by_group) == 4
    assert max(len(of_group) for of_group in by_group.values()) == _BLOCKS_OF_PREFIX
    wrong = {}
    with StoreClient(shared_master) as client:
        for group, of_group in by_group.items():
            for place in {min(of_group), sorted(of_group)[len(of_group) // 2]}:
                value = client.get(of_group[place])
                client.overwrite(of_group[place], bytes(len(value)))
                error = _error_of(trio["two"], trio["cold"], siblings.pop())
                client.overwrite(of_group[place], value)
                wrong[f"group {group}, block {place}"] = error
    right = [_error_of(trio["two"], trio["cold"], sibling) for sibling in siblings]
    print(f"errors with right KV: {right}; with one wrong block: {wrong}")
    assert max(right) < LOGPROB_TOLERANCE / 4
    assert min(wrong.values()) > LOGPROB_TOLERANCE * 4

# SPDX-License-Identifier: Apache-2.0
"""Deployments that share a master: what ``cache_prefix`` parts, and resets do not."""

import threading

import httpx
import pytest

from tests.e2e.client import ask, random_prompts, reset_local_cache

_JUNCTION = 3840


# It ends with the others: puts fail that land on a server that is gone.
@pytest.fixture(scope="session")
def deployments(trio, shared_master, make_server):
    """``blue`` and ``blue two`` have no ``cache_prefix``, ``green`` has one."""
    green = make_server(
        mooncake_config=shared_master.write_client_config(),
        kv_transfer_config={"kv_connector_extra_config": {"cache_prefix": "green"}},
    )
    return {"blue": trio["one"], "blue two": trio["two"], "green": green.start()}


def _prompts(seed: str) -> list[list[int]]:
    return random_prompts(seed, _JUNCTION + 8, 1400, 600, 607, 614, 621)


def _store_hit(server, prompt) -> int:
    """Send a prompt to a server that has nothing cached locally."""
    answer = ask(server, prompt, max_tokens=1)
    assert answer.local_hit_tokens == 0
    reset_local_cache(server)
    return answer.store_hit_tokens


def _keys_of(master, name: str) -> set[str]:
    master.wait_until_still()
    keys, is_green = master.keys(), name == "green"
    return {key for key in keys if key.startswith("green@") == is_green}


def _reset(server, **params: str) -> bool:
    reply = httpx.post(
        f"{server.base_url}/reset_prefix_cache", params=params, timeout=60
    )
    return reply.raise_for_status().json()["success"]


def test_a_deployment_sees_its_own_junctions_and_nobody_elses(
    shared_master, deployments
):
    a, b, c, d, e = _prompts("isolation")
    blue, green = deployments["blue"], deployments["green"]
    assert [_store_hit(blue, prompt) for prompt in (a, b)] == [0, 0]
    # The same prompts hit where the prefix is the same: there is something to see.
    assert _store_hit(deployments["blue two"], c) == _JUNCTION
    # Had C been told of blue's junction, it would have left a tail there, and D
    # would hit; so D finds a junction for itself, and only E hits.
    assert [_store_hit(green, prompt) for prompt in (c, d, e)] == [0, 0, _JUNCTION]
    assert _keys_of(shared_master, "green")


def test_a_local_reset_takes_nothing_from_the_store(shared_master, deployments):
    _store_hit(deployments["blue"], _prompts("local reset")[0])
    before = _keys_of(shared_master, "blue")
    assert before
    assert _reset(deployments["blue"])
    assert _keys_of(shared_master, "blue") == before


def test_a_store_reset_wipes_the_keys_of_every_deployment(shared_master, deployments):
    a, b, c, *_ = _prompts("store reset")
    for name in ("blue", "green"):
        assert [_store_hit(deployments[name], prompt) for prompt in (a, b)] == [0, 0]
        assert _keys_of(shared_master, name)
    assert _reset(deployments["blue"], reset_external="true")
    assert shared_master.keys() == set()
    assert _store_hit(deployments["green"], c) == 0


def test_a_store_reset_that_is_refused_has_wiped_the_store_all_the_same(
    shared_master, deployments
):
    blue, green = deployments["blue"], deployments["green"]
    a, b, *_ = _prompts("refused reset")
    _store_hit(green, a)
    assert _keys_of(shared_master, "green")
    running = threading.Thread(target=ask, args=(blue, b, 1000), daemon=True)
    running.start()
    while _reset(blue):
        assert running.is_alive()
    assert not _reset(blue, reset_external="true")
    assert _keys_of(shared_master, "green") == set()
    running.join()
    reset_local_cache(blue)


def test_pausing_one_deployment_wipes_the_keys_of_every_one(shared_master, deployments):
    blue, green = deployments["blue"], deployments["green"]
    _store_hit(green, _prompts("pause")[0])
    assert _keys_of(shared_master, "green")
    httpx.post(f"{blue.base_url}/pause", timeout=60).raise_for_status()
    httpx.post(f"{blue.base_url}/resume", timeout=60).raise_for_status()
    assert _keys_of(shared_master, "green") == set()

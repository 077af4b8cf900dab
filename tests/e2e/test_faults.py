# SPDX-License-Identifier: Apache-2.0
"""Instances and masters that die under a server: it goes on, and answers right.

The finer moments (during a load, during a save) are in
``tests/engine/test_real_store.py``.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from testbed.server import VllmServer, serving
from testbed.store import MooncakeMaster
from tests.e2e.client import (
    Answer,
    ask,
    ask_cold,
    complete,
    random_prompts,
    reset_local_cache,
)

_SHARED = 3848  # the last block boundary (32 tokens) is 3840
_TOLERANCE = 1e-3


def _same(answer: Answer, other: Answer) -> bool:
    return answer.token_ids == other.token_ids and answer.logprobs == pytest.approx(
        other.logprobs, abs=_TOLERANCE
    )


@pytest.fixture(scope="module")
def pair(master, make_server) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Two servers on one store, which recompute what they cannot load."""
    config = master.write_client_config()
    policy = {"kv_load_failure_policy": "recompute"}
    servers = tuple(
        make_server(mooncake_config=config, weights_seed=1, kv_transfer_config=policy)
        for _ in range(2)
    )
    with serving(*servers):
        yield servers


def _wait_until_loading(server: VllmServer) -> None:
    for _ in range(300):
        text = httpx.get(f"{server.base_url}/metrics", timeout=10).text
        if any(
            line.startswith("vllm:num_requests_waiting{") and float(line.split()[-1])
            for line in text.splitlines()
        ):
            return
        time.sleep(0.1)
    pytest.fail("the request never waited for a load")


def test_an_instance_killed_while_another_loads_from_it(pair) -> None:
    """Stands on vLLM: it reports the failed load and recomputes the request.

    That the dead instance's keys, which the master still lists, are not asked for
    without end, is ours (``repairs/endless_loads.py``).
    """
    one, two = pair
    a, b, c, d = random_prompts("killed", _SHARED, 1400, 600, 10, 11)
    for prompt in (a, b):
        ask(one, prompt)
        reset_local_cache(one)
    # Stopped, it delivers nothing: the load is under way until the kill ends it.
    os.killpg(one.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(complete, two, c)
        _wait_until_loading(two)
        one.process.kill()
        answer = loading.result(timeout=200)
    assert _same(answer, ask_cold(two, c))
    # C's prefix is cached locally by now; a sibling is right as well.
    assert _same(ask(two, d), ask_cold(two, d))
    assert "A load from the store failed for request" in two.log()


def test_a_master_that_dies_and_comes_back(pair, master: MooncakeMaster) -> None:
    """Stands on Mooncake's client, which mounts its segment at the new master."""
    _, server = pair
    a, b = random_prompts("master", _SHARED, 1400, 600)
    before = ask(server, a)
    reset_local_cache(server)
    master.kill()
    assert ask(server, b).store_hit_tokens == 0
    assert _same(ask(server, a), before)

    master.start()
    for attempt in range(30):
        (prompt,) = random_prompts(f"back {attempt}", 900, 100)
        stored = ask(server, prompt)
        reset_local_cache(server)
        again = ask(server, prompt)
        if again.store_hit_tokens:
            assert again.store_hit_tokens == 992
            assert _same(again, stored)
            return
        time.sleep(1)
    pytest.fail("the master is back, and nothing hits")

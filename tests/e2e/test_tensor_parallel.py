# SPDX-License-Identifier: Apache-2.0
"""Two ranks: one lookup for both, and every rank's tails in the store."""

import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from testbed.models import GEMMA3
from testbed.server import VllmServer
from tests.e2e.client import ask, ask_cold, random_prompts, reset_local_cache

_CORES = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.quiet,
    pytest.mark.skipif(
        len(_CORES) < 2, reason="two ranks need a core each; this machine gives one"
    ),
]


@pytest.fixture
def make_two_ranks(fresh_master, make_server):
    def make(junctions: bool) -> VllmServer:
        return make_server(
            mooncake_config=fresh_master.write_client_config(),
            junctions=junctions,
            weights_seed=1,
            server_args=("--tensor-parallel-size", "2"),
            env={"VLLM_CPU_OMP_THREADS_BIND": f"{_CORES[0]}|{_CORES[1]}"},
        )

    return make


def _hashes_by_rank(keys: set[str]) -> dict[str, set[tuple[str, str]]]:
    """Return ``(group, hash)`` of each rank's keys.

    Keys read ``model@tp_rank:R@...@group:G@hash``.
    """
    hashes: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for key in keys:
        rank = key.split("@tp_rank:")[1].split("@")[0]
        group, block_hash = key.split("@group:")[1].split("@")
        hashes[rank].add((group, block_hash))
    return hashes


def _processes_that_hold(socket_path: str) -> list[str]:
    """Return the titles of the processes that listen on a Unix socket."""
    inodes = {
        f"socket:[{line.split()[6]}]"
        for line in Path("/proc/net/unix").read_text().splitlines()
        if line.endswith(socket_path)
    }
    titles = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = {os.readlink(fd) for fd in (process / "fd").iterdir()}
            title = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:
            continue
        if held & inodes:
            titles.append(title)
    return titles


def test_stock_siblings_hit_nothing(make_two_ranks):
    with make_two_ranks(junctions=False) as server:
        hits = []
        for prompt in random_prompts("tp-stock", 3848, 1400, 600, 607, 614):
            hits.append(ask(server, prompt, max_tokens=1).store_hit_tokens)
            reset_local_cache(server)
    assert hits == [0, 0, 0, 0]


def test_siblings_hit_and_every_rank_stores_its_tails(fresh_master, make_two_ranks):
    first, second, *siblings = random_prompts("tp", 3848, 1400, 600, 607, 614)
    with make_two_ranks(junctions=True) as server:
        (socket,) = Path(server.socket_dir).glob("lookup_rpc_port_*")
        (listener,) = _processes_that_hold(str(socket))
        assert listener.endswith("Worker_TP0")

        assert ask(server, first, max_tokens=1).store_hit_tokens == 0
        reset_local_cache(server)
        before = fresh_master.keys()
        assert ask(server, second, max_tokens=1).store_hit_tokens == 0
        reset_local_cache(server)
        stored = _hashes_by_rank(fresh_master.keys() - before)
        assert stored["0"] == stored["1"]
        # The full group's blocks past the shared ones, and in each of three groups
        # a window of two blocks at the junction and at the prompt's own replay.
        counts = Counter(group for group, _ in stored["0"])
        assert sorted(counts.values()) == [4, 4, 4, 19]

        for sibling in siblings:
            loaded = ask(server, sibling)
            assert loaded.store_hit_tokens == GEMMA3.expected_hit_tokens(3848)
            reset_local_cache(server)
            cold = ask_cold(server, sibling)
            assert loaded.token_ids == cold.token_ids
            assert loaded.logprobs == pytest.approx(cold.logprobs, abs=1e-3)
            reset_local_cache(server)

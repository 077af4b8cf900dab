# SPDX-License-Identifier: Apache-2.0
"""What a soak rests on: its rule catches wrong KV, and it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
from tests.e2e.processes import alive, descendants

_ROOT = Path(__file__).parents[2]
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


def _start(json_path: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.soak", "--json", str(json_path), *args],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_short_soak_is_clean_and_says_what_it_did(tmp_path):
    soak = _start(tmp_path / "soak.json", "--minutes", "0.2", "--seed", "5")
    output, _ = soak.communicate(timeout=1200)
    assert soak.returncode == 0, output
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["seed"] == 5
    assert report["problems"] == []
    assert report["replies"] > 0
    assert report["hit_tokens"] > 0
    assert (report["wrong_outputs"], report["leaked_references"]) == (0, 0)


def test_a_soak_that_is_told_to_end_leaves_no_process_behind(tmp_path):
    soak = _start(tmp_path / "soak.json", "--minutes", "10")
    started: set[int] = set()
    deadline = time.monotonic() + 180
    # A store and three servers, each with a supervisor, and the servers' engines.
    while len(started) < 11 and time.monotonic() < deadline:
        started |= descendants(soak.pid)
        time.sleep(0.2)
    os.kill(soak.pid, signal.SIGTERM)
    soak.communicate(timeout=180)
    assert soak.returncode != 0
    deadline = time.monotonic() + 60
    while alive(started) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert alive(started) == set()
    assert not (tmp_path / "soak.json").exists()

# SPDX-License-Identifier: Apache-2.0
"""A real server's ``/metrics`` while siblings find a junction, hit, and lose the store.

And the doctor, as a newcomer would run it, in set-ups in which hits are 0.
"""

import json
import os
import subprocess
import sys
import time

import httpx
import pytest

from testbed.server import VllmServer, serving
from testbed.store import MooncakeMaster
from tests.e2e.client import ask, random_prompts, reset_local_cache
from vllm.junctions.doctor.reading import ServerMetrics

_TRANSFER = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}


def _metrics(server: VllmServer) -> ServerMetrics:
    text = httpx.get(f"{server.base_url}/metrics", timeout=10).text
    return ServerMetrics.parse(server.base_url, text)


def _lookups(metrics: ServerMetrics) -> dict[str, float]:
    found = metrics.by_label("vllm:junctions_lookups_total", "outcome")
    return {outcome: number for outcome, number in found.items() if number}


def _until_still(server: VllmServer) -> tuple[int, int]:
    """Return lookups that failed and that came late, once no more are counted."""
    seen = None
    while True:
        found = _lookups(_metrics(server))
        counted = (int(found.get("error", 0)), int(found.get("timeout", 0)))
        if counted == seen:
            return counted
        seen = counted
        time.sleep(5)


def _doctor(*args: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "vllm.junctions.doctor", *args],
        env={**os.environ, "VLLM_HOST_IP": "127.0.0.1", "PYTHONHASHSEED": "0", **env},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    print(done.stdout, done.stderr[-2000:])
    return done.returncode, done.stdout


@pytest.mark.slow
def test_metrics_and_doctor_follow_a_servers_life(tmp_path, make_server):
    master = MooncakeMaster(tmp_path).start()
    config = master.write_client_config()
    server = make_server(mooncake_config=config, env={"VLLM_LOGGING_LEVEL": "DEBUG"})
    with server:
        assert _metrics(server).total("vllm:junctions_lookups_total") == 0
        assert "vllm:junctions_lookups_total" in _metrics(server).samples
        a, b, c = random_prompts("metrics", 3848, 1400, 600, 607)
        for prompt in (a, b, c):
            ask(server, prompt)
            reset_local_cache(server)
        metrics = _metrics(server)
        assert _lookups(metrics) == {"nothing_stored": 1, "tail_missing": 1, "hit": 1}
        assert metrics.total("vllm:junctions_found_total", source="store") == 1
        lost = metrics.by_label("vllm:junctions_lost_tokens_sum", "group")
        assert sum(lost.values()) == 3840
        assert max(lost, key=lost.__getitem__).split("-")[1] == "SlidingWindow"
        blocks = metrics.total("vllm:junctions_tail_blocks_saved_total")
        saved = metrics.total("vllm:junctions_tail_bytes_saved_total")
        put = metrics.total(
            "vllm:mooncake_store_operation_bytes_total", operation="save_put"
        )
        assert blocks > 0
        assert 0 < saved < put / 2
        assert metrics.total("vllm:junctions_lookup_rpcs_count") == 3
        assert metrics.total("vllm:junctions_faults_total") == 0
        assert metrics.info["block_tokens"] == "32"
        assert "Why: " in server.log()
        status, said = _doctor(
            "--kv-transfer-config",
            json.dumps(_TRANSFER),
            "--base-url",
            server.base_url,
            MOONCAKE_CONFIG_PATH=str(config),
        )
        assert status == 0, said
        assert "1 of 3 lookups hit" in said
        assert "put, get and remove in" in said
        master.kill()
        ask(server, random_prompts("gone", 500, 100)[0])
        # On a busy machine patience may end before Mooncake says that it failed, and
        # then both are counted, one after the other.
        failed, late = _until_still(server)
        assert 1 <= failed + late <= 2
        status, said = _doctor(
            "--base-url", server.base_url, MOONCAKE_CONFIG_PATH=str(config)
        )
        assert status == 1
        assert "is unreachable" in said
        counted = f"of {3 + failed + late} counted lookups, {failed} failed and {late}"
        assert f"{counted} were not answered in time" in said


@pytest.mark.slow
def test_the_doctor_finds_why_hits_are_zero(trio, fresh_master, tmp_path, make_server):
    """Seeds differ, the shared prefix is short, junctions are off."""
    config = fresh_master.write_client_config()
    one = trio["one"]
    two = make_server(mooncake_config=config, env={"PYTHONHASHSEED": "7"})
    off = make_server(mooncake_config=config, junctions=False)
    with serving(two, off):
        prompts = random_prompts("short", 20, 300, 310)
        files = []
        for server, prompt in zip((one, two), prompts, strict=True):
            assert ask(server, prompt).store_hit_tokens == 0
            files.append(tmp_path / f"{len(files)}.json")
            files[-1].write_text(json.dumps(prompt))
        urls = [f"--base-url={server.base_url}" for server in (one, two, off)]
        asked = [f"--prompt={file}" for file in files]
        status, said = _doctor("--only-servers", *urls, *asked)
    assert status == 1
    assert "hash_root differs" in said
    assert "they share 20 tokens, less than one scheduler block of 32" in said
    assert f"{off.base_url}: no vllm:junctions_lookups_total" in said

# SPDX-License-Identifier: Apache-2.0
"""Does the plan of a recording predict what the recorded server counted?

Starts a store and two real servers, stock and then with junctions, which record their
traffic. It is the soak's: siblings over random prefix trees, replays, next turns, from
one client. Then plans the recordings and compares the hit tokens with the servers' own
counters. ``make bench-plan-check`` runs it.
"""

import argparse
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import httpx
import msgspec

from benchmarks.soak.fleet import read_counters
from benchmarks.soak.workload import Forest, jobs
from testbed.models import DEFAULT_MODEL, MODELS
from testbed.server import VllmServer, serving
from testbed.store import MooncakeMaster
from vllm.junctions.plan.run import Options, make_plan

RESULTS = Path(__file__).parent / "results"
LARGEST_ERROR = 0.03
_PAUSE_SECONDS = 0.1
_SERVER_ARGS = (
    *("--max-model-len", "3072", "--num-gpu-blocks-override", "4000"),
    *("--max-num-batched-tokens", "1024", "--max-num-seqs", "8"),
)


class Check(msgspec.Struct, frozen=True):
    """One side: what the server counted, and what the plan says. Tokens."""

    counted_local: int
    counted_store: int
    planned_local: int
    planned_store: int
    requests: int

    @property
    def error(self) -> float:
        counted = self.counted_local + self.counted_store
        planned = self.planned_local + self.planned_store
        return abs(planned - counted) / max(counted, 1)


def check(model: str, junctions: bool, num_requests: int, work_dir: Path) -> Check:
    recordings = [work_dir / f"traffic-{name}.jsonl" for name in ("one", "two")]
    model_args = MODELS[model].write(work_dir, 1)
    with MooncakeMaster(work_dir / "master") as master:
        config = master.write_client_config(512 << 20, 64 << 20)
        servers = [
            VllmServer(
                model_args,
                work_dir / path.stem,
                mooncake_config=config,
                junctions=junctions,
                kv_transfer_config={
                    "kv_connector_extra_config": {
                        "junctions_record": str(path),
                        "junctions_record_secret": "the same for both",
                    }
                },
                server_args=_SERVER_ARGS,
            )
            for path in recordings
        ]
        with serving(*servers), httpx.Client(timeout=120) as http:
            send(http, servers, num_requests)
            time.sleep(2)
            counters = [
                read_counters(http.get(f"{server.base_url}/metrics").text)
                for server in servers
            ]
    report = make_plan(recordings, Options())
    figures = report.policies["junctions" if junctions else "stock"]
    return Check(
        sum(counted["local_hit_tokens"] for counted in counters),
        sum(counted["hit_tokens"] for counted in counters),
        figures.hit_tokens - figures.store_hit_tokens,
        figures.store_hit_tokens,
        report.trace.requests,
    )


def send(http: httpx.Client, servers: list[VllmServer], num_requests: int) -> None:
    """Send the soak's traffic, each request to the server that it is meant for."""
    for job in islice(jobs(Forest(seed=7), "check", len(servers)), num_requests):
        server = servers[job.instance]
        body = {
            "model": server.model,
            "prompt": job.prompt,
            "max_tokens": min(job.max_tokens, 12),
            "temperature": 0,
            "ignore_eos": True,
        }
        url = f"{server.base_url}/v1/completions"
        http.post(url, json=body).raise_for_status()
        # Saves end after answers; a sibling right behind would not find them.
        time.sleep(_PAUSE_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--model", choices=sorted(MODELS), default=DEFAULT_MODEL)
    parser.add_argument("--json", type=Path, default=RESULTS / "plan_check.json")
    args = parser.parse_args()
    checks = {}
    for side, junctions in (("stock", False), ("junctions", True)):
        with tempfile.TemporaryDirectory(prefix="junctions-plan-") as directory:
            one = check(args.model, junctions, args.requests, Path(directory))
        checks[side] = one
        print(
            f"{side}: {one.requests} requests; the server counted "
            f"{one.counted_local:,} local and {one.counted_store:,} store hit tokens, "
            f"the plan says {one.planned_local:,} and {one.planned_store:,}: "
            f"{one.error:.2%} off",
            flush=True,
        )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(checks)))
    return int(any(one.error > LARGEST_ERROR for one in checks.values()))


if __name__ == "__main__":
    sys.exit(main())

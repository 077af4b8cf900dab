# SPDX-License-Identifier: Apache-2.0
"""How long a plan of a million requests takes, and how much memory.

Makes a trace up, in Mooncake's format and blocks of 512 tokens: documents with
questions, chats, and prompts that share nothing. Then plans it under all policies.
``make bench-plan`` runs it.
"""

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vllm.junctions.plan import text
from vllm.junctions.plan.__main__ import show
from vllm.junctions.plan.run import Options, make_plan

RESULTS = Path(__file__).parent / "results"
BLOCK = 512
# Conversations that go on at the same time.
_OPEN = 2_000
TARGET_SECONDS, TARGET_GIB = 15 * 60, 4.0


class _Talk:
    """A document or a chat: a prefix that later prompts begin with."""

    def __init__(self, rng: random.Random, ids: Iterator[int]) -> None:
        self._rng, self._ids = rng, ids
        kind = rng.random()
        self.is_chat = 0.4 <= kind < 0.8
        self.turns = 1 if kind >= 0.8 else rng.randint(1, 8)
        low, high = (200, 3_000) if self.is_chat else (2_000, 30_000)
        self.tokens = round(low * (high / low) ** rng.random())
        self.blocks: list[int] = []

    def prompt(self) -> tuple[int, list[int]]:
        self.turns -= 1
        while len(self.blocks) < self.tokens // BLOCK:
            self.blocks.append(next(self._ids))
        length = self.tokens + self._rng.randint(20, 600)
        own = -(-length // BLOCK) - len(self.blocks)
        ids = self.blocks + [next(self._ids) for _ in range(own)]
        if self.is_chat:
            self.tokens = length + self._rng.randint(50, 1_000)
            self.blocks = ids[: length // BLOCK]
        return length, ids


def write_trace(path: Path, num_requests: int, seed: int = 0) -> None:
    """Write a trace of so many requests."""
    rng, ids = random.Random(seed), iter(range(1 << 62))
    talks = [_Talk(rng, ids) for _ in range(_OPEN)]
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for number in range(num_requests):
            index = rng.randrange(_OPEN)
            length, hash_ids = talks[index].prompt()
            if not talks[index].turns:
                talks[index] = _Talk(rng, ids)
            line = {
                "timestamp": number * 10,
                "input_length": length,
                "output_length": 100,
                "hash_ids": hash_ids,
            }
            file.write(encoder.encode(line) + b"\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--trace", type=Path, default=RESULTS / "plan_cost.jsonl")
    parser.add_argument("--json", type=Path, default=RESULTS / "plan_cost.json")
    args = parser.parse_args()
    args.trace.parent.mkdir(parents=True, exist_ok=True)
    write_trace(args.trace, args.requests)
    wall, cpu = time.perf_counter(), time.process_time()
    report = make_plan([args.trace], Options())
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    show(report)
    print(
        f"\n{text.compact(report.trace.requests)} requests, a file of "
        f"{args.trace.stat().st_size / 2**20:,.0f} MiB, {len(report.policies)} "
        f"policies: {seconds:,.0f} s ({cpu_seconds:,.0f} s of CPU, target "
        f"{TARGET_SECONDS} s), {gib:.2f} GiB at most (target {TARGET_GIB} GiB)"
    )
    figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_gib": gib}
    args.json.write_text(json.dumps(figures | {"requests": args.requests}, indent=2))
    return int(seconds > TARGET_SECONDS or gib > TARGET_GIB)


if __name__ == "__main__":
    sys.exit(main())

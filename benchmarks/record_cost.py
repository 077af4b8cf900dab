# SPDX-License-Identifier: Apache-2.0
"""What recording traffic costs an engine's step, with 256 requests running.

Two engines in a box, one that records and one that does not, take the same steps by
turns: real scheduler and connector, no model. As requests end, others come. Counted
are the CPU seconds of the engine's thread in each step, and on top of them all those
of the thread that writes, as if the engine had to wait for each. ``make bench-record``
runs it.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from testbed.box import Box, BoxEngine, EngineOptions, Group, Layout

RESULTS = Path(__file__).parent / "results"
TARGET_SHARE = 0.01
NUM_RUNNING = 256
_PROMPT_TOKENS, _OUTPUT_TOKENS = 2_048, 128
LAYOUT = Layout((Group("full", 64), Group("swa", 64, 128)), hash_tokens=64)


class _Side:
    """One engine under a steady load."""

    def __init__(self, engine: BoxEngine) -> None:
        self.engine = engine
        self.times: list[float] = []
        self._rng = random.Random(0)
        self._shared = self._tokens(_PROMPT_TOKENS // 2)
        self._number = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, 1 << 20) for _ in range(count)]

    def fill(self) -> None:
        """Have 256 requests again, spread over their lengths."""
        while len(self.engine.scheduler.requests) < NUM_RUNNING:
            self._number += 1
            tokens = self._rng.randint(1, _OUTPUT_TOKENS)
            prompt = self._shared + self._tokens(_PROMPT_TOKENS // 2)
            self.engine.add(prompt, f"r{self._number}", tokens)

    def step(self) -> None:
        start = time.thread_time()
        self.engine.step()
        self.times.append(time.thread_time() - start)

    def writer_seconds(self) -> float:
        """Return the CPU seconds of the thread that writes the recording."""
        writer = self.engine.scheduler.connector._recorder.writer
        return time.clock_gettime(time.pthread_getcpuclockid(writer._thread.ident))


def measure(num_steps: int) -> dict[str, float]:
    """Run both sides; return figures, times in milliseconds a step."""
    options = EngineOptions(
        side="on",
        num_blocks=40_000,
        max_batched_tokens=65_536,
        max_requests=NUM_RUNNING,
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "traffic.jsonl"
        with Box(LAYOUT, options) as box, Box(LAYOUT, options) as other:
            extra = {"junctions_record": str(path)}
            plain = _Side(box.engine())
            recorded = _Side(other.engine(extra_config=extra))
            for number in range(num_steps):
                # By turns, and by turns first: what else the machine does hits both.
                sides = [plain, recorded]
                for side in sides if number % 2 else reversed(sides):
                    side.fill()
                    side.step()
            writer_seconds = recorded.writer_seconds()
        num_lines = path.read_bytes().count(b"\n") - 1
    # The first steps prefill all requests at once.
    first = num_steps // 4
    pairs = zip(plain.times[first:], recorded.times[first:], strict=True)
    step = statistics.median(plain.times[first:]) * 1e3
    engine = statistics.median(after - before for before, after in pairs) * 1e3
    writer = writer_seconds / num_steps * 1e3
    return {
        "requests_running": NUM_RUNNING,
        "steps": num_steps,
        "requests_recorded": num_lines,
        "step_ms": step,
        "engine_thread_ms": engine,
        "writer_thread_ms": writer,
        "share": (engine + writer) / step,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, default=RESULTS / "record_cost.json")
    args = parser.parse_args()
    figures = measure(args.steps)
    print(
        f"{NUM_RUNNING} requests running, {args.steps} steps a side, "
        f"{figures['requests_recorded']} requests recorded: a step takes "
        f"{figures['step_ms']:.2f} ms of the engine's thread; recording adds "
        f"{figures['engine_thread_ms']:+.3f} ms to it (median of pairs) and takes "
        f"{figures['writer_thread_ms']:.3f} ms of its own thread: "
        f"{figures['share']:+.2%} together, target {TARGET_SHARE:.0%}"
    )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(figures, indent=2))
    return int(figures["share"] > TARGET_SHARE)


if __name__ == "__main__":
    sys.exit(main())

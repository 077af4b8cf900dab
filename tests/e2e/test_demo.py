# SPDX-License-Identifier: Apache-2.0
"""The main job as a user runs it, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.demo_result import DemoRow
from tests.e2e.processes import alive, descendants

_ROOT = Path(__file__).parents[2]


def _start(json_path: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.demo", "--json", str(json_path), *args],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


_EXPECTED = {"gemma3-tiny": (3840, 4000), "llama-eagle-tiny": (3808, 3968)}
Demos = dict[str, tuple[subprocess.Popen[str], Path]]


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Iterator[Demos]:
    """One of each model, side by side: most of their time servers start."""
    json_dir = tmp_path_factory.mktemp("demo")
    started = {}
    for model in _EXPECTED:
        json_path = json_dir / f"{model}.json"
        started[model] = (_start(json_path, "--model", model), json_path)
    yield started
    for demo, _ in started.values():
        demo.kill()
        demo.wait()


@pytest.mark.parametrize("model", _EXPECTED)
def test_the_demo_shows_stock_at_zero_and_siblings_at_the_junction(demos, model):
    demo, json_path = demos[model]
    output, _ = demo.communicate(timeout=900)
    assert demo.returncode == 0, output
    result = json.loads(json_path.read_text())
    assert set(result) == {"stock", "junctions"}
    names = ["A", "B", "C", "D", "A again"]
    expected = _EXPECTED[model]
    for rows in result.values():
        assert [row["name"] for row in rows] == names * 2
        assert all(set(row) == set(DemoRow.__struct_fields__) for row in rows)
    for half in (0, 5):
        stock = [row["store_hit_tokens"] for row in result["stock"][half : half + 5]]
        ours = [row["store_hit_tokens"] for row in result["junctions"][half : half + 5]]
        assert stock[:4] == [0, 0, 0, 0]
        assert ours[:4] == [0, 0, expected[half // 5], expected[half // 5]]
        assert ours[4] >= stock[4] > 0


# SIGTERM is the soak's test, SIGKILL that of `unit/testbed/test_processes.py`: all end
# their servers by the same code.
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path):
    demo = _start(tmp_path / "demo.json")
    started: set[int] = set()
    deadline = time.monotonic() + 120
    # A store, a server and its engine, the first two with a supervisor each.
    while len(started) < 6 and time.monotonic() < deadline:
        started |= descendants(demo.pid)
        time.sleep(0.2)
    os.kill(demo.pid, signal.SIGINT)
    demo.communicate(timeout=120)
    deadline = time.monotonic() + 60
    while alive(started) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert alive(started) == set()
    assert not (tmp_path / "demo.json").exists()


def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path):
    demo = _start(tmp_path / "demo.json", "--model", "gpt-7")
    output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 2
    assert "no model 'gpt-7'; one of: gemma3-tiny, llama-eagle-tiny" in output

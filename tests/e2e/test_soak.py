# SPDX-License-Identifier: Apache-2.0
"""A soak that is cut short, and one that is told to end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.processes import alive, descendants

_ROOT = Path(__file__).parents[2]


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
    soak = _start(tmp_path / "soak.json", "--minutes", "0.5", "--seed", "5")
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
    # A store and three servers, each with a supervisor. Engines are the demo's test.
    while len(started) < 8 and time.monotonic() < deadline:
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

# SPDX-License-Identifier: Apache-2.0
"""Runs the two-instance end-to-end tests again and again beside a busy process.

    python -m tools.repeat_e2e --runs 30 --starts 3

Once is luck where a fault strikes now and then. Counts tests that failed, and what a
test that passes hides: transfers that Mooncake dropped (a second try may have saved
them), loads that failed, and how long threads of ours were ready to run and did not.
Servers are started anew ``--starts`` times, and each time the tests run as often as it
takes, with other prompts. The busy process has a session of its own, as anybody else's
has.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from testbed.starvation import StarvationWatch

_TESTS = "tests/e2e/test_two_instances.py"
_BUSY = "while True: pass"
_LEAST_WAIT_SECONDS = 0.5
# What servers print of transfers that were dropped or failed, retried or not.
_TRANSFER_FAULTS = re.compile(
    r"no transfer progress|no status frame|task failures|TRANSFER_FAIL|"
    r"tried (?:again|once more)|failed_keys=[1-9]"
)
_FAILED_LOADS = re.compile(r"A load from the store failed|failed to load", re.I)


@dataclass
class Batch:
    """Runs of the tests on the same servers, and what these say of them."""

    num_runs: int
    passed: bool
    seconds: float
    transfer_faults: list[str] = field(default_factory=list)
    failed_loads: list[str] = field(default_factory=list)
    longest_wait_seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return self.passed and not self.transfer_faults and not self.failed_loads

    def __str__(self) -> str:
        return (
            f"{self.num_runs} runs {'passed' if self.passed else 'FAILED'} in "
            f"{self.seconds:.0f} s: {len(self.transfer_faults)} faults of transfers, "
            f"{len(self.failed_loads)} failed loads, longest wait for a processor "
            f"{self.longest_wait_seconds:.1f} s"
        )


def run_batch(tests: str, num_runs: int, temp_dir: Path) -> Batch:
    """Run the tests on servers of their own, whose logs land below ``temp_dir``."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", tests, f"--basetemp={temp_dir}"],
        env={**os.environ, "JUNCTIONS_E2E_REPEATS": str(num_runs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # The busy process is nobody's loss.
    with StarvationWatch(process.pid, _LEAST_WAIT_SECONDS) as watch:
        output, _ = process.communicate()
    batch = Batch(num_runs, process.returncode == 0, time.monotonic() - started)
    if not batch.passed:
        print(output[-4000:])
    if longest := watch.longest():
        batch.longest_wait_seconds = longest.seconds
        print(longest, flush=True)
    _read_logs(batch, temp_dir)
    return batch


def _read_logs(batch: Batch, temp_dir: Path) -> None:
    logs = sorted(temp_dir.rglob("server.log"))
    if not logs:
        raise SystemExit(f"no server left a log below {temp_dir}")
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if _TRANSFER_FAULTS.search(line):
                batch.transfer_faults.append(line)
            if _FAILED_LOADS.search(line):
                batch.failed_loads.append(line)


def repeat(tests: str, num_runs: int, num_starts: int) -> list[Batch]:
    """Run the tests ``num_runs`` times in all, on ``num_starts`` sets of servers."""
    batches = []
    with tempfile.TemporaryDirectory(prefix="vj-repeat-") as temp_dir:
        for start in range(num_starts):
            here = num_runs // num_starts + (start < num_runs % num_starts)
            batches.append(run_batch(tests, here, Path(temp_dir, str(start))))
            print(batches[-1], flush=True)
            for line in (batches[-1].transfer_faults + batches[-1].failed_loads)[:3]:
                print(f"  {line[:160]}", flush=True)
    return batches


def summary(batches: list[Batch], num_busy: int) -> str:
    waits = [batch.longest_wait_seconds for batch in batches]
    return (
        f"{sum(batch.num_runs for batch in batches)} runs beside {num_busy} busy: "
        f"{sum(not batch.passed for batch in batches)} of {len(batches)} starts with a "
        f"failed test; {sum(len(batch.failed_loads) for batch in batches)} failed "
        f"loads; {sum(len(batch.transfer_faults) for batch in batches)} faults of "
        f"transfers; longest wait for a processor {max(waits):.1f} s (0: all below "
        f"{_LEAST_WAIT_SECONDS})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--starts", type=int, default=3, help="sets of servers")
    parser.add_argument("--busy", type=int, default=1, help="busy processes")
    parser.add_argument("--tests", default=_TESTS)
    args = parser.parse_args()
    if not 1 <= args.starts <= args.runs:
        parser.error("at least one start, and a run for each")
    busy = [
        subprocess.Popen([sys.executable, "-c", _BUSY], start_new_session=True)
        for _ in range(args.busy)
    ]
    try:
        batches = repeat(args.tests, args.runs, args.starts)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(summary(batches, args.busy))
    return 0 if all(batch.clean for batch in batches) else 1


if __name__ == "__main__":
    sys.exit(main())

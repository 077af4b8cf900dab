# SPDX-License-Identifier: Apache-2.0
"""Two owners of values, one of which stands still, and readers that read from both.

``python -m tests.e2e.frozen_peer`` reads in all ways that tests/README.md has figures
of; it takes about twenty-five minutes.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed.store import MooncakeMaster
from tests.e2e.transfers import BUFFERS_PER_KEY, OWNERS

# Mooncake's own, which the test bed otherwise makes generous.
DEFAULTS = ("--client_ttl=10", "--default_kv_lease_ttl=5000")
# How, buffers a key, threads.
Reader = tuple[str, int, int]
Outcome = dict[str, float]


def start(*args: object) -> subprocess.Popen[str]:
    """Start one of the ends of ``transfers.py``."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.transfers", *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    """Wait until a process has said a line."""
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    raise RuntimeError(f"the process ended before it said {line!r}")


def tell(process: subprocess.Popen[str]) -> None:
    """Let a process go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def outcome_of(process: subprocess.Popen[str]) -> Outcome:
    """Return what a process says at its end."""
    return json.loads(process.communicate(timeout=120)[0].splitlines()[-1])


@contextmanager
def ending(*processes: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read_from_a_frozen_peer(
    master: MooncakeMaster, readers: Sequence[Reader]
) -> dict[Reader, Outcome]:
    """Let readers read while one of two owners stands still; return what came of it.

    The owner goes on when all of them have returned.
    """
    address = f"127.0.0.1:{master.rpc_port}"
    owners = [start("own", address, name) for name in OWNERS]
    with ending(*owners):
        for owner in owners:
            wait_for(owner, "ready")
        ends = [start("read", address, *reader) for reader in readers]
        with ending(*ends):
            for end in ends:
                wait_for(end, "ready")
            os.kill(owners[0].pid, signal.SIGSTOP)
            for end in ends:
                tell(end)
            for end in ends:
                wait_for(end, "returned")
            os.kill(owners[0].pid, signal.SIGCONT)
            for end in ends:
                tell(end)
            found = [outcome_of(end) for end in ends]
    return dict(zip(readers, found, strict=True))


def main() -> None:
    print("how, buffers a key, threads: seconds, worst result, buffers written late")
    for num_buffers, num_threads in itertools.product(BUFFERS_PER_KEY, (1, 4, 8)):
        readers = [(how, num_buffers, num_threads) for how in ("stock", "ours")]
        with (
            tempfile.TemporaryDirectory() as folder,
            MooncakeMaster(Path(folder), extra_args=DEFAULTS) as master,
        ):
            for reader, one in read_from_a_frozen_peer(master, readers).items():
                print(*reader, one["seconds"], one["worst"], one["late"], flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Transfers with a peer that stands still for longer than Mooncake waits for them.

Found by ``make soak``: a read that had been given up was served late, into KV blocks of
another request, which then saved them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from testbed.store import MooncakeMaster
from tests.e2e.transfers import NUM_VALUES
from vllm.junctions.store.transfers import TRANSFER_FAIL

pytestmark = pytest.mark.slow

_STANDS_STILL_SECONDS = 75
# Long enough for transfers to be dropped.
_STALLS_SECONDS = 13
_HOWS = ("raw", "bounded", "waited")


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.transfers", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    pytest.fail(f"the process ended before it said {line!r}")


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def outcomes_of(readers: list[subprocess.Popen[str]]) -> list[dict[str, float]]:
    """Return what readers tell when the owner has gone on."""
    for reader in readers:
        wait_for(reader, "returned")
        tell(reader)
    outs = [reader.communicate(timeout=60)[0] for reader in readers]
    return [json.loads(out.splitlines()[-1]) for out in outs]


@pytest.fixture(scope="module")
def outcomes(master: MooncakeMaster) -> Iterator[dict[str, dict[str, float]]]:
    """What each reader says of a peer that stood still."""
    address = f"127.0.0.1:{master.rpc_port}"
    owner = start("own", address)
    readers = {}
    try:
        wait_for(owner, "ready")
        readers = {how: start("read", address, how) for how in _HOWS}
        for reader in readers.values():
            wait_for(reader, "ready")
        os.kill(owner.pid, signal.SIGSTOP)
        for reader in readers.values():
            tell(reader)
        time.sleep(_STANDS_STILL_SECONDS)
        os.kill(owner.pid, signal.SIGCONT)
        found = dict(zip(readers, outcomes_of([*readers.values()]), strict=True))
        print(found)
        yield found
    finally:
        for process in (owner, *readers.values()):
            process.kill()
            process.wait()


def test_mooncake_writes_into_the_memory_of_reads_that_it_gave_up(outcomes) -> None:
    """Why ``transfers.py`` is there; when this fails, it may go."""
    assert outcomes["raw"]["worst"] == TRANSFER_FAIL
    assert outcomes["raw"]["late"] > 0


def test_nothing_comes_after_a_read_that_failed(outcomes) -> None:
    assert outcomes["bounded"]["worst"] == TRANSFER_FAIL
    # Before it would have been given up.
    assert outcomes["bounded"]["seconds"] < 55
    assert outcomes["bounded"]["late"] == 0


def test_nothing_comes_after_a_read_that_was_given_up_and_waited_for(outcomes) -> None:
    assert outcomes["waited"]["worst"] == TRANSFER_FAIL
    assert outcomes["waited"]["seconds"] > _STANDS_STILL_SECONDS
    assert outcomes["waited"]["late"] == 0


@pytest.mark.parametrize(
    "role", [["read", "bounded"], ["write"]], ids=["read", "write"]
)
def test_a_peer_that_stalls_for_a_moment_costs_time_and_no_transfer(
    fresh_master, role: list[str]
) -> None:
    address = f"127.0.0.1:{fresh_master.rpc_port}"
    owner = start("own", address)
    other = None
    try:
        wait_for(owner, "ready")
        other = start(role[0], address, *role[1:])
        wait_for(other, "ready")
        os.kill(owner.pid, signal.SIGSTOP)
        tell(other)
        time.sleep(_STALLS_SECONDS)
        os.kill(owner.pid, signal.SIGCONT)
        (outcome,) = outcomes_of([other])
        assert outcome["worst"] >= 0
        assert outcome.get("late", 0) == 0
        assert outcome.get("right", NUM_VALUES) == NUM_VALUES
    finally:
        for process in filter(None, (owner, other)):
            process.kill()
            process.wait()

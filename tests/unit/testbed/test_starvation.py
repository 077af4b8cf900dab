# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import time

import pytest

from testbed.starvation import StarvationWatch

_SPIN = "while True: pass"
# The kernel gives a thread of this policy a few thousandths of a busy core.
_SPIN_WHEN_IDLE = (
    "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n" + _SPIN
)


@pytest.fixture
def on_one_core():
    """Start Python code in processes that share one core."""
    core = min(os.sched_getaffinity(0))
    started = []

    def start(code: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", code])
        started.append(process)
        os.sched_setaffinity(process.pid, {core})
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_thread_that_gets_no_processor_is_found(on_one_core):
    with StarvationWatch(os.getpid(), least_seconds=0.1) as watch:
        starved = on_one_core(_SPIN_WHEN_IDLE)
        on_one_core(_SPIN)
        deadline = time.monotonic() + 60
        while starved not in {wait.pid for wait in watch.waits}:
            assert time.monotonic() < deadline, watch.waits
            time.sleep(0.1)
    found = watch.longest()
    assert found is not None
    assert found.seconds >= 0.1
    assert watch.longest(since=time.monotonic()) is None


def test_a_thread_that_sleeps_or_was_stopped_does_not_starve(on_one_core):
    with StarvationWatch(os.getpid(), least_seconds=1.0) as watch:
        stopped = on_one_core("import time\nwhile True: time.sleep(0.01)")
        time.sleep(1)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(3)
        os.kill(stopped, signal.SIGCONT)
        time.sleep(1.5)
    assert [wait for wait in watch.waits if wait.pid == stopped] == []

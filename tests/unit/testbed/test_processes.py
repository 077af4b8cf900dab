# SPDX-License-Identifier: Apache-2.0
import os
import pty
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from testbed.processes import ChildProcess, ProcessFailed, free_port_range


def test_a_port_range_is_one_that_mooncake_accepts():
    """It refuses any port of the kernel's ephemeral range, 32768 to 60999."""
    for _ in range(20):
        first, last = free_port_range(64)
        assert last - first == 63
        assert 1024 <= first <= last < 32768


def test_a_port_range_leaves_out_ports_in_use():
    first, _ = free_port_range(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        for _ in range(50):
            low, high = free_port_range(500)
            assert not low <= first <= high


def _start_sleeper(tmp_path) -> ChildProcess:
    """A child that starts one of its own, and both ignore polite requests."""
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "p = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(600)'])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    return ChildProcess("sleeper", [sys.executable, "-c", code], tmp_path / "log")


def _grandchild(log_path: Path) -> int:
    deadline = time.monotonic() + 30
    while not (text := log_path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(text)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def test_kill_ends_what_a_child_started(tmp_path):
    child = _start_sleeper(tmp_path)
    grandchild = _grandchild(tmp_path / "log")
    child.kill()
    deadline = time.monotonic() + 10
    while _is_alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(grandchild)


def test_a_child_ends_with_a_parent_that_was_killed(tmp_path):
    starter = os.fork()
    if starter == 0:
        _start_sleeper(tmp_path)
        time.sleep(600)
    while not (tmp_path / "log").exists():
        time.sleep(0.05)
    grandchild = _grandchild(tmp_path / "log")
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    deadline = time.monotonic() + 30
    while _is_alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _is_alive(grandchild)


def test_a_child_that_ends_early_is_quoted(tmp_path):
    child = ChildProcess(
        "quitter", [sys.executable, "-c", "print('no luck'); exit(3)"], tmp_path / "log"
    )
    with child, pytest.raises(ProcessFailed, match="status 3") as error:
        child.wait_until(lambda: False, 30)
    assert "no luck" in str(error.value)


def test_a_child_is_scheduled_with_us_and_signalled_apart(tmp_path):
    """A session each would be a scheduling group each, see ``ChildProcess``."""
    code = "import os; print(os.getsid(0), os.getpgid(0))"
    with ChildProcess("child", [sys.executable, "-c", code], tmp_path / "log") as child:
        deadline = time.monotonic() + 30
        while child.running and time.monotonic() < deadline:
            time.sleep(0.05)
        session, group = map(int, (tmp_path / "log").read_text().split())
    assert session == os.getsid(0)
    assert group == child.pid != os.getpgid(0)


_IN_A_TERMINAL = """
import sys, time
from pathlib import Path
from testbed.processes import ChildProcess

code = '''
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
signal.signal(signal.SIGTERM, lambda *_: exit("terminated"))
print("ready", flush=True)
while True: time.sleep(0.1)
'''
log = Path(sys.argv[1])
with ChildProcess("child", [sys.executable, "-c", code], log) as child:
    child.wait_until(lambda: "ready" in log.read_text(), 30)
    try:
        print("started", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(1)
"""


def test_control_c_reaches_us_alone(tmp_path):
    """Children end when we end them, in our order, not by the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(
            sys.executable,
            [sys.executable, "-c", _IN_A_TERMINAL, str(tmp_path / "log")],
        )
    output = b""
    while b"started" not in output:
        output += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "log").read_text().split() == ["ready", "terminated"]

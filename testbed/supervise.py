# SPDX-License-Identifier: Apache-2.0
"""Runs a command, and ends it and all it started when the starter is gone.

    supervise.py FD COMMAND...

``FD`` is the read end of a pipe that the starter alone can write to. It never does:
end of file means that the starter has ended, however that came about. A stand-alone
script, because it has to start fast.
"""

import os
import select
import signal
import subprocess
import sys
import time

_GRACE_SECONDS = 10.0


def main() -> int:
    pipe, command = int(sys.argv[1]), sys.argv[2:]
    child = subprocess.Popen(command)
    # Passed on, so that a polite request to us is one to the command.
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    while child.poll() is None:
        if select.select([pipe], [], [], 0.1)[0]:
            _end_all(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_all(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    # Our own process group: the command, what it left behind, and ourselves.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

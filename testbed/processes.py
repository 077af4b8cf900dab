# SPDX-License-Identifier: Apache-2.0
"""Child processes that end with us, whatever happens."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

_SUPERVISOR = Path(__file__).with_name("supervise.py")
_STOP_SECONDS = 20.0
# Above Mooncake's default range, below the kernel's ephemeral one.
_FIRST_PORT, _LAST_PORT = 17001, 32767


class ProcessFailed(RuntimeError):
    """A child ended, or did not get ready in time."""


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody uses right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def free_port_range(count: int) -> tuple[int, int]:
    """Return ``(first, last)`` of ``count`` consecutive free loopback ports.

    They lie below those that the kernel hands out to anybody. Mooncake takes no
    others, and silently uses its default range instead.
    """
    for _ in range(200):
        first = random.randrange(_FIRST_PORT, _LAST_PORT - count)
        last = first + count - 1
        if all(_is_free(port) for port in range(first, last + 1)):
            return first, last
    raise ProcessFailed(f"found no {count} consecutive free ports on loopback")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class ChildProcess:
    """A child in its own process group, with its output in a file.

    Leaving the ``with`` block ends it and everything it started; so does the end of
    this process, even by ``SIGKILL`` (see ``supervise.py``).

    It stays in our session, because Linux schedules each session as a group
    (``sched_autogroup_enabled``) and some kernels let one group keep every processor
    for ten seconds while its peer has to answer: see "Servers and processors" in
    ``tests/README.md``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # Nobody else inherits the write end, so it closes when this process ends.
        read_end, write_end = os.pipe()
        self._life_line: int | None = write_end
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_SUPERVISOR), str(read_end), *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                # Ctrl-C goes to us alone; we end our children in order.
                process_group=0,
                pass_fds=(read_end,),
            )
        os.close(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def log_tail(self, num_lines: int = 25) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def wait_until(self, ready: Callable[[], bool], timeout_seconds: float) -> None:
        """Wait for ``ready()``; a child that ends first is an error.

        Raises:
            ProcessFailed: With the last lines of the child's output.
        """
        deadline = time.monotonic() + timeout_seconds
        while not ready():
            if not self.running:
                raise ProcessFailed(
                    f"{self.name} ended with status {self._process.returncode} "
                    f"before it was ready. Its last words ({self.log_path}):\n"
                    f"{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ProcessFailed(
                    f"{self.name} was not ready after {timeout_seconds:.0f} s. Its "
                    f"last words ({self.log_path}):\n{self.log_tail()}"
                )
            time.sleep(0.2)

    def kill(self) -> None:
        """End the child's whole process group at once, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._life_line is not None:
            os.close(self._life_line)
            self._life_line = None

    def stop(self) -> None:
        """End the child: politely first, then its whole process group."""
        if self.running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        # The leader is gone or deaf; what it started shares its process group.
        self.kill()

    def __enter__(self) -> "ChildProcess":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

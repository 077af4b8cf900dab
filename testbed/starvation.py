# SPDX-License-Identifier: Apache-2.0
"""Threads that were ready to run and got no processor.

A server on a busy machine is slow because it waits for something, or because the kernel
does not let it run; only the second is the test bed's own affair. The figures are the
kernel's (``/proc/PID/task/TID/schedstat``), so a watch that is late itself misses
nothing but detail.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True, order=True)
class Wait:
    """One thread's wait for a processor.

    Attributes:
        seconds: How long it was ready to run before it ran, at least.
        pid: Its process.
        tid: The thread.
        name: What the thread calls itself.
        autogroup: The scheduling group of its session, in the kernel's words.
        cores: Those on which it may run, as in ``0-1``.
        ended: When it ran again, in seconds of the monotonic clock.
    """

    seconds: float
    pid: int
    tid: int
    name: str
    autogroup: str
    cores: str
    ended: float

    def __str__(self) -> str:
        return (
            f"thread {self.tid} ({self.name}) of process {self.pid} was ready to run "
            f"for {self.seconds:.1f} s and did not ({self.autogroup}, cores "
            f"{self.cores})"
        )


class _Schedstat(NamedTuple):
    """What the kernel has counted of a thread so far."""

    ran_ns: int
    waited_ns: int
    num_slices: int


class StarvationWatch:
    """Watches a process and all below it; ``with`` ends the watch.

    Args:
        root_pid: The process whose descendants, and itself, are watched.
        least_seconds: Shorter waits are not kept.
    """

    def __init__(self, root_pid: int, least_seconds: float = 1.0) -> None:
        self._root_pid = root_pid
        self._least_seconds = least_seconds
        self._seen: dict[int, _Schedstat] = {}
        self._seen_at = time.monotonic()
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._run, daemon=True)
        self.waits: list[Wait] = []

    def longest(self, since: float = 0.0) -> Wait | None:
        """Return the longest wait that ended after ``since``, if there was any."""
        return max((one for one in self.waits if one.ended >= since), default=None)

    def __enter__(self) -> "StarvationWatch":
        self._sampler.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._sampler.join()

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._sample()

    def _sample(self) -> None:
        now, seen = time.monotonic(), {}
        for pid in _tree(self._root_pid):
            for tid, stat in _schedstats(pid):
                seen[tid] = stat
                last = self._seen.get(tid)
                if last and stat.num_slices > last.num_slices:
                    seconds = _longest_wait(last, stat, now - self._seen_at)
                    if seconds >= self._least_seconds:
                        self.waits.append(_describe(seconds, pid, tid, now))
        self._seen, self._seen_at = seen, now


def _longest_wait(last: _Schedstat, stat: _Schedstat, elapsed_seconds: float) -> float:
    """Return a lower bound of the longest wait that ended between two looks.

    The kernel adds a wait up when it ends. Those that also began in between took no
    longer together than ``elapsed_seconds``; what is more belongs to one wait.
    """
    waited = (stat.waited_ns - last.waited_ns) / 1e9
    mean = waited / (stat.num_slices - last.num_slices)
    return max(waited - elapsed_seconds, mean)


def _tree(root_pid: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                stat = Path("/proc", name, "stat").read_text()
                parent = int(stat.rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(name))
    queue = [root_pid]
    while queue:
        pid = queue.pop()
        queue.extend(children.get(pid, ()))
        yield pid


def _schedstats(pid: int) -> Iterator[tuple[int, _Schedstat]]:
    # Threads come and go between listing and reading.
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text()
                yield int(tid), _Schedstat(*map(int, text.split()))


def _describe(seconds: float, pid: int, tid: int, now: float) -> Wait:
    status = _read(f"/proc/{pid}/task/{tid}/status")
    cores = status.partition("Cpus_allowed_list:")[2].split()
    return Wait(
        seconds,
        pid,
        tid,
        _read(f"/proc/{pid}/task/{tid}/comm"),
        _read(f"/proc/{pid}/autogroup"),
        cores[0] if cores else "unknown",
        now,
    )


def _read(path: str) -> str:
    # Some kernels have no autogroups, and the thread may be gone.
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return "unknown"

# SPDX-License-Identifier: Apache-2.0
"""Memory for values to land in; what may still be written to is never used again."""

import ctypes
import mmap
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.logger import init_logger

logger = init_logger(__name__)

# What a load thread reads at a time, and keeps resident between loads.
RUN_BYTES = 32 << 20
# Address space; pages exist where values have landed and not been set aside.
RESERVED_BYTES = 64 << 30
# Linux' number; Python has the name from 3.12 on.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Unavailable(Exception):
    """There can be no landing memory; the message says why."""


@dataclass(frozen=True)
class Run:
    """A stretch of landing memory.

    Attributes:
        offset: Where it begins, in bytes from the beginning of the memory.
        num_bytes: How long it is.
    """

    offset: int
    num_bytes: int


class LandingMemory:
    """Address space that is handed out in runs. Thread-safe.

    Args:
        reserved_bytes: How much there is, with all that will be set aside.
        run_bytes: What a run has, unless more is asked for.

    Raises:
        Unavailable: The system has no such address space to give.
    """

    # The addresses of what was set aside stay taken until the process ends: late
    # writes must find nobody else there.
    _kept: ClassVar[list["LandingMemory"]] = []

    def __init__(
        self, reserved_bytes: int = RESERVED_BYTES, run_bytes: int = RUN_BYTES
    ) -> None:
        self.run_bytes = run_bytes
        self.reserved_bytes = reserved_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self.memory = mmap.mmap(-1, reserved_bytes, flags=flags)
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"no {reserved_bytes >> 30} GiB of address space: {error}"
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._lock = threading.Lock()
        self._free: list[Run] = []
        self._set_aside: list[Run] = []
        self._num_used_bytes = 0
        self._is_used_up = False

    @classmethod
    def registered_with(cls, store: Any) -> "LandingMemory":
        """Return landing memory that a Mooncake store may read into.

        Raises:
            Unavailable: The system has no address space, or the store refuses it.
        """
        memory = cls(RESERVED_BYTES)
        status = store.register_buffer(memory.address, memory.reserved_bytes)
        if status != 0:
            raise Unavailable(f"the store does not register it: {status}")
        return memory

    @property
    def set_aside_bytes(self) -> int:
        """How much will never be used again."""
        with self._lock:
            return sum(run.num_bytes for run in self._set_aside)

    def take(self, num_bytes: int) -> Run | None:
        """Return a run of at least so many bytes; None when all is used up."""
        with self._lock:
            for index, run in enumerate(self._free):
                if run.num_bytes >= num_bytes:
                    return self._free.pop(index)
            wanted = -(-max(num_bytes, 1) // self.run_bytes) * self.run_bytes
            if self._num_used_bytes + wanted > self.reserved_bytes:
                self._tell_once()
                return None
            run = Run(self._num_used_bytes, wanted)
            self._num_used_bytes += wanted
            return run

    def _tell_once(self) -> None:
        if not self._is_used_up:
            logger.error(
                "Landing memory is used up: peers of the store stood still during so "
                "many loads that %d MiB are set aside for good. Loads fail from now "
                "on; restart this instance.",
                sum(run.num_bytes for run in self._set_aside) >> 20,
            )
        self._is_used_up = True

    def give_back(self, run: Run) -> None:
        """Take back a run that nobody writes to any more."""
        with self._lock:
            self._free.append(run)

    def set_aside(self, run: Run) -> None:
        """Take back a run that may still be written to; its pages are freed."""
        with self._lock:
            self._set_aside.append(run)
            if self not in self._kept:
                self._kept.append(self)
            # Of the earlier ones too: something may have arrived there since.
            for one in self._set_aside:
                self.memory.madvise(mmap.MADV_DONTNEED, one.offset, one.num_bytes)

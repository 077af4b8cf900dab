# SPDX-License-Identifier: Apache-2.0
"""Writes a recording on a thread of its own, and never stands in anyone's way.

What does not fit the queue is left out; a file that cannot be written costs the
recording and one warning.
"""

import fcntl
import hashlib
import io
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm.junctions.record.format import Header, RecordedRequest

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 256 << 20
_MAX_WAITING = 4096
# Hashing many requests at once takes fewer turns from the engine's thread.
_PAUSE_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_ID_BYTES = 6


@dataclass(slots=True)
class Finished:
    """A request, as the engine's thread hands it over.

    Attributes:
        line: The line to write, its hash ids still missing.
        block_hashes: Of the prompt, one a line's block; the last for the rest, if it
            has whole hash units.
        rest_tokens: Tokens of the last block, where it is not whole; else 0.
    """

    line: RecordedRequest
    block_hashes: list[bytes]
    rest_tokens: int


class IdMaker:
    """Turns block hashes into numbers that say nothing of the tokens.

    A keyed hash with 48 bits left. Without ``secret`` the key is random and only
    this object has it, so ids of two recordings have nothing in common. With the same
    secret they do, for instances of one store; whoever has it as well can find out
    whether a prompt that he guesses is in a recording.
    """

    def __init__(self, secret: str | None = None) -> None:
        key = secrets.token_bytes(32)
        if secret is not None:
            key = hashlib.sha256(secret.encode()).digest()
        # What has begun with the key goes on with each hash; twice as fast as anew.
        self._begun = hashlib.blake2b(key, digest_size=_ID_BYTES)

    def ids(self, hashes: list[bytes], rest_tokens: int = 0) -> list[int]:
        """Return a number for each hash; see :class:`Finished`."""
        if rest_tokens:
            last = hashes[-1] + rest_tokens.to_bytes(4, "big")
            hashes = [*hashes[:-1], last]
        return [self._id(one) for one in hashes]

    def _id(self, block_hash: bytes) -> int:
        hasher = self._begun.copy()
        hasher.update(block_hash)
        return int.from_bytes(hasher.digest(), "big")

    def space(self, root: bytes) -> str:
        """Return a name of all recordings with comparable ids.

        Args:
            root: Of the block hash chain; instances with different ones share nothing.
        """
        return f"{self._id(b'id space' + root):012x}"


class RecordingWriter:
    """One recording.

    The file starts anew at 256 MiB; the one before it stays, as ``PATH.1``. So does
    one that is there when the recording begins. If another process writes to the same
    file, its own gets the process' number.

    Attributes:
        num_written: Lines.
        num_left_out: Requests that came faster than they could be written.
        is_over: Whether nothing is written any more.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        ids: IdMaker,
        max_bytes: int = MAX_FILE_BYTES,
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        self.path = path
        self.num_written = self.num_left_out = 0
        self.is_over = False
        self._header = msgspec.json.encode(header) + b"\n"
        self._ids = ids
        self._max_bytes = max_bytes
        self._pause_seconds = pause_seconds
        self._encoder = msgspec.json.Encoder()
        self._waiting: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._file: io.FileIO | None = None
        self._num_bytes = 0
        self._thread = threading.Thread(
            target=self._run, name="junctions-record", daemon=True
        )
        self._guarded(self._open)
        if not self.is_over:
            self._thread.start()

    def add(self, finished: Finished) -> None:
        """Hand a request over; never waits."""
        if self.is_over:
            return
        if self._waiting.qsize() >= _MAX_WAITING:
            self.num_left_out += 1
            return
        self._waiting.put(finished)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_CLOSE_SECONDS)
        self.is_over = True

    def _run(self) -> None:
        while not self.is_over:
            is_last = self._closing.wait(self._pause_seconds)
            self._guarded(self._write_waiting)
            if is_last:
                break
        if self._file is not None:
            self._file.close()
        if self.num_left_out:
            logger.warning(
                "vllm-junctions left %d requests out of its recording: they came "
                "faster than they could be written.",
                self.num_left_out,
            )

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            self.is_over = True
            logger.warning(
                "vllm-junctions records no traffic to %s (any more): %s. The server "
                "goes on as it is. To record, see that junctions_record names a file "
                "in a folder that is there and has room, and start it again.",
                self.path,
                getattr(error, "strerror", None) or error,
            )

    def _open(self) -> None:
        if self._is_taken(self.path):
            name = f"{self.path.stem}.{os.getpid()}{self.path.suffix}"
            self.path = self.path.with_name(name)
        if self.path.exists() and self.path.stat().st_size:
            if _is_empty_recording(self.path):
                # It pushes none out that holds requests.
                self.path.unlink()
            else:
                os.replace(self.path, f"{self.path}.1")
        self._file = io.FileIO(self.path, "ab")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._num_bytes = 0
        self._write(self._header)

    @staticmethod
    def _is_taken(path: Path) -> bool:
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _write(self, lines: bytes) -> None:
        assert self._file is not None
        written = 0
        while written < len(lines):
            written += self._file.write(lines[written:]) or 0
        self._num_bytes += len(lines)

    def _write_waiting(self) -> None:
        if self._waiting.empty():
            return
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} has gone")
        lines: list[bytes] = []
        num_bytes = self._num_bytes
        while not self._waiting.empty():
            line = self._line(self._waiting.get_nowait())
            if num_bytes + len(line) > self._max_bytes:
                self._write(b"".join(lines))
                self._start_anew()
                lines, num_bytes = [], self._num_bytes
            lines.append(line)
            num_bytes += len(line)
            self.num_written += 1
        self._write(b"".join(lines))

    def _line(self, finished: Finished) -> bytes:
        ids = self._ids.ids(finished.block_hashes, finished.rest_tokens)
        line = msgspec.structs.replace(finished.line, hash_ids=ids)
        return self._encoder.encode(line) + b"\n"

    def _start_anew(self) -> None:
        assert self._file is not None
        self._file.close()
        self._open()


def _is_empty_recording(path: Path) -> bool:
    """Return whether a file is the first line of a recording and no more."""
    with path.open("rb") as file:
        return b'"junctions_recording"' in file.readline() and not file.readline()


def now_ms() -> int:
    """Return the time in ms since 1970."""
    return time.time_ns() // 1_000_000

# SPDX-License-Identifier: Apache-2.0
"""Traces in Mooncake's format, read one request at a time, in order of arrival.

A line is a request: ``timestamp`` (ms), ``input_length`` and ``output_length``
(tokens), ``hash_ids`` (one a block; equal ids mean equal prefixes). A recording of
this package has a first line of its own, see :mod:`vllm.junctions.record.format`.
"""

import mmap
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from vllm.junctions.plan.prompts import ContinuedUnits, Prompt, Units
from vllm.junctions.record.format import FORMAT_VERSION, Header

MOONCAKE_BLOCK_TOKENS = 512
_GZIP = b"\x1f\x8b"


class TraceError(Exception):
    """A trace that cannot be replayed; the message is one sentence for its user."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[int]
    local_hit: Annotated[int, Meta(ge=0)] = 0
    store_hit: Annotated[int, Meta(ge=0)] = 0
    ttft_ms: float | None = None
    prefill_ms: float | None = None


@dataclass
class Totals:
    """What all lines together say.

    Attributes:
        num_requests: Requests.
        prompt_tokens: Tokens of all prompts.
        hit_tokens: Those that the recorded engine found somewhere.
        timed_tokens: Tokens that requests with a known prefill time computed.
        timed_ms: What that took them.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    timed_tokens: int = 0
    timed_ms: float = 0.0

    def add(self, request: TraceRequest) -> None:
        """Count a request."""
        hit_tokens = request.local_hit + request.store_hit
        self.num_requests += 1
        self.prompt_tokens += request.input_length
        self.hit_tokens += hit_tokens
        if request.prefill_ms is not None:
            self.timed_tokens += max(request.input_length - hit_tokens, 0)
            self.timed_ms += request.prefill_ms


@dataclass
class _File:
    """One file, with where its lines are and when their requests arrived."""

    path: Path
    header: Header | None = None
    offsets: array = field(default_factory=lambda: array("q"))
    arrivals_ms: array = field(default_factory=lambda: array("d"))

    @property
    def instance(self) -> object:
        """The same for files of one instance."""
        if self.header is None:
            return self.path
        return (self.header.id_space, self.header.start_ms, self.header.engine)


def _refuse_twice(paths: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise TraceError(f"The trace {path} is given twice.")
        seen.add(path.resolve())


class Trace:
    """One trace, or several that ran side by side, one file an instance.

    Attributes:
        headers: First lines of those that are recordings.
        block_tokens: Tokens per hash id.
        totals: What their lines amount to.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        block_tokens: int | None = None,
        num_requests: int | None = None,
    ) -> None:
        """Read all lines once, and keep where they are: 16 bytes a request.

        Args:
            paths: JSONL files.
            block_tokens: Tokens per hash id of files that do not say; default: 512.
            num_requests: How many lines to read of each; None for all.

        Raises:
            TraceError: There is no such file, it holds no request, a line is none,
                or files do not fit each other.
        """
        self.totals = Totals()
        self._decoder = msgspec.json.Decoder(TraceRequest)
        _refuse_twice(paths)
        self._files = [self._find_header(path) for path in paths]
        self.headers = [file.header for file in self._files if file.header]
        self.block_tokens = self._one_block_size(block_tokens)
        for file in self._files:
            self._index(file, num_requests)
        if not self.totals.num_requests:
            raise TraceError(f"The trace {paths[0]} holds no requests.")
        # An engine that served nothing is none to route prompts to.
        self._files = [file for file in self._files if file.offsets]
        self.headers = [file.header for file in self._files if file.header]
        # Two generations of one recording are of one instance.
        names = [file.instance for file in self._files]
        self._instances = [names.index(name) for name in names]
        arrivals = np.concatenate([np.array(f.arrivals_ms) for f in self._files])
        self._order = np.argsort(arrivals, kind="stable").astype(np.int32)

    @property
    def name(self) -> str:
        """What to call it."""
        return ", ".join(file.path.name for file in self._files)

    @property
    def num_instances(self) -> int:
        """How many instances wrote it, as far as it says."""
        return len(set(self._instances))

    def prompts(self, units: Units | ContinuedUnits) -> Iterator[Prompt]:
        """Read all prompts in order of arrival, without keeping them."""
        firsts = np.cumsum([0] + [len(file.offsets) for file in self._files])
        known = sorted(set(self._instances))
        numbers = [known.index(first) for first in self._instances]
        opened = [file.path.open("rb") for file in self._files]
        try:
            maps = [
                mmap.mmap(one.fileno(), 0, access=mmap.ACCESS_READ) for one in opened
            ]
            for number in self._order:
                which = int(np.searchsorted(firsts, number, side="right")) - 1
                file, index = self._files[which], int(number - firsts[which])
                start = file.offsets[index]
                end = maps[which].find(b"\n", start)
                line = maps[which][start : end if end >= 0 else None]
                request = self._decoder.decode(line)
                arrived_ms = file.arrivals_ms[index]
                yield self._prompt(request, units, numbers[which], arrived_ms)
        finally:
            for one in opened:
                one.close()

    def _prompt(
        self,
        request: TraceRequest,
        units: Units | ContinuedUnits,
        instance: int,
        arrived_ms: float,
    ) -> Prompt:
        ids = units.of(request.hash_ids, request.input_length)
        stored_ms = arrived_ms + (request.ttft_ms or 0.0)
        looked_up_ms = arrived_ms
        if request.prefill_ms is not None:
            looked_up_ms = max(stored_ms - request.prefill_ms, arrived_ms)
        is_known = self.num_instances > 1
        first = min(self.block_tokens // units.unit_tokens, len(ids)) - 1
        return Prompt(
            request.input_length,
            ids,
            int(ids[max(first, 0)]) >> 20 if len(ids) else 0,
            instance if is_known else None,
            looked_up_ms,
            stored_ms,
        )

    def _find_header(self, path: Path) -> _File:
        try:
            with path.open("rb") as lines:
                first = lines.readline()
        except OSError as error:
            raise TraceError(
                f"Cannot read the trace {path}: {error.strerror or error}."
            ) from error
        if first.startswith(_GZIP):
            raise TraceError(f"{path} is compressed: unpack it first (gunzip).")
        if b'"junctions_recording"' not in first:
            return _File(path)
        try:
            header = msgspec.json.decode(first, type=Header)
        except msgspec.DecodeError as error:
            raise TraceError(f"The first line of {path} is none: {error}.") from error
        if header.junctions_recording > FORMAT_VERSION:
            raise TraceError(
                f"{path} was recorded by vllm-junctions {header.version}, which is "
                "newer than this one."
            )
        return _File(path, header)

    def _one_block_size(self, given: int | None) -> int:
        found = {header.block_tokens for header in self.headers}
        if given and given not in (found or {given}):
            raise TraceError(
                f"The recording says that its blocks are of {min(found)} tokens: leave "
                f"out --block-tokens {given}."
            )
        if len(self.headers) < len(self._files):
            found.add(given or MOONCAKE_BLOCK_TOKENS)
        if len(found) > 1:
            raise TraceError(
                "The traces have blocks of different lengths "
                f"({', '.join(map(str, sorted(found)))} tokens): plan each alone."
            )
        return found.pop()

    def _index(self, file: _File, num_requests: int | None) -> None:
        start_ms = file.header.start_ms if file.header else 0
        offset = 0
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if len(file.offsets) == num_requests:
                    return
                begin, offset = offset, offset + len(line)
                if not line.strip() or (number == 1 and file.header):
                    continue
                if file.header and not line.endswith(b"\n"):
                    # Of a recording that goes on while it is read.
                    return
                request = self._checked(line, number, file.path)
                file.offsets.append(begin)
                file.arrivals_ms.append(start_ms + request.timestamp)
                self.totals.add(request)

    def _checked(self, line: bytes, number: int, path: Path) -> TraceRequest:
        try:
            request = self._decoder.decode(line)
        except msgspec.ValidationError as error:
            raise TraceError(
                f"Line {number} of {path} is no request: {error}."
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(
                f"Line {number} of {path} is no complete JSON object: {error}."
            ) from error
        num_blocks = -(-request.input_length // self.block_tokens)
        if len(request.hash_ids) != num_blocks:
            raise TraceError(
                f"Line {number} of {path} has {len(request.hash_ids)} hash_ids, but "
                f"{request.input_length} tokens are {num_blocks} blocks of "
                f"{self.block_tokens}. Blocks of another length are given with "
                "--block-tokens; a recording says it in its first line."
            )
        return request

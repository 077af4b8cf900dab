# SPDX-License-Identifier: Apache-2.0
"""What a run has measured so far, on disk after each question.

The first line of a journal holds the run's settings, each further one an answered
question. A run that ends early goes on from there.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.junction_probe import ProbeError

SCHEMA_VERSION = 1
_T = TypeVar("_T")


class Settings(msgspec.Struct, frozen=True):
    """What two runs must have in common for their answers to be comparable.

    Attributes:
        prompts: Digest of all prompts in order.
        past_prefix_tokens: How far each prompt reaches past the shared prefix.
        scheduler_block_tokens: 0: the server does not tell.
    """

    schema_version: int
    model: str
    dtype: str
    vllm_version: str
    shots: int
    questions: int
    concurrency: int
    reset_local_cache: bool
    max_tokens: int
    instruction: str
    prompts: str
    prefix_tokens: int
    past_prefix_tokens: list[int]
    scheduler_block_tokens: int


class Answer(msgspec.Struct, frozen=True):
    """One question. Lengths in tokens, times in seconds from sending it.

    Attributes:
        local_hit_tokens: Loaded from the server's own cache; None: several
            questions were under way, so only their sum is known.
        store_hit_tokens: The same, from the store.
        query_tokens: Tokens looked up in the store, or locally without a store.
        number: What the text gives as the answer; None: nothing.
        after_restart: Whether an earlier run ended right before this question.
    """

    index: int
    prompt_tokens: int
    output_tokens: int
    local_hit_tokens: int | None
    store_hit_tokens: int | None
    query_tokens: int | None
    ttft_seconds: float
    total_seconds: float
    finish_reason: str
    text: str
    number: str | None
    correct: bool
    after_restart: bool = False


class Totals(msgspec.Struct, frozen=True):
    """Counters over a stretch of questions that were under way together."""

    local_hit_tokens: int
    store_hit_tokens: int
    query_tokens: int


class Journal:
    """Appends answers to a file; knows those that are there already."""

    def __init__(self, path: Path, settings: Settings | None = None) -> None:
        """Open or begin a journal.

        Args:
            settings: The run's; None: those of the file, which must be there.

        Raises:
            ProbeError: The file is another run's, damaged or missing.
        """
        self.path = path
        self.answers: dict[int, Answer] = {}
        self.totals: list[Totals] = []
        self.dropped_cut_line = False
        lines = self._lines(mend=settings is not None) if path.exists() else []
        if lines:
            self.settings = self._decode(lines[0], 1, Settings)
            self._check(settings)
            self._read(lines[1:])
        elif settings is not None:
            self.settings = settings
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(settings)
        else:
            raise ProbeError(f"{path} holds no answers")

    def _lines(self, mend: bool) -> list[bytes]:
        content = self.path.read_bytes()
        # A line is written at once, with its end: what has none was cut.
        whole, _, cut = content.rpartition(b"\n")
        if cut:
            self.dropped_cut_line = True
        if cut and mend:
            os.truncate(self.path, len(content) - len(cut))
        return whole.splitlines()

    def _read(self, lines: list[bytes]) -> None:
        for number, line in enumerate(lines, 2):
            if b'"index":' in line:
                answer = self._decode(line, number, Answer)
                self.answers[answer.index] = answer
            else:
                self.totals.append(self._decode(line, number, Totals))

    def _decode(self, line: bytes, number: int, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise ProbeError(
                f"Line {number} of {self.path} is damaged ({error}); mend or remove "
                "it, or give another --json"
            ) from error

    def _check(self, wanted: Settings | None) -> None:
        different = [
            name
            for name in Settings.__struct_fields__
            if wanted and getattr(wanted, name) != getattr(self.settings, name)
        ]
        if different:
            raise ProbeError(
                f"{self.path} holds answers of a run with other settings "
                f"({', '.join(different)}); remove it or give another --json"
            )

    def _append(self, entry: Settings | Answer | Totals) -> None:
        with self.path.open("ab") as out:
            out.write(msgspec.json.encode(entry) + b"\n")
            out.flush()
            os.fsync(out.fileno())

    def add(self, answer: Answer) -> None:
        self._append(answer)
        self.answers[answer.index] = answer

    def add_totals(self, totals: Totals) -> None:
        self._append(totals)
        self.totals.append(totals)

    def missing(self, indices: Iterable[int]) -> list[int]:
        return [index for index in indices if index not in self.answers]

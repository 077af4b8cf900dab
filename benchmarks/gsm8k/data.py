# SPDX-License-Identifier: Apache-2.0
"""GSM8K: its files, few-shot prompts, and the answer in an answer's text."""

import hashlib
import re
from pathlib import Path

import httpx
import msgspec

from benchmarks.junction_probe import ProbeError

# 40 tokens or more: behind a shorter one, a question's own replay tail may lie
# within the shared prefix, and later questions hit there without junctions.
INSTRUCTION = (
    "Work through the problem step by step in the style of the examples above. "
    "Write each calculation inside double angle brackets, then give the final "
    "number on a line of its own after four hash signs, and then stop there."
)
_SOURCE = (
    "https://raw.githubusercontent.com/openai/grade-school-math/master/"
    "grade_school_math/data"
)
_CACHE = Path(__file__).parents[2] / ".cache" / "gsm8k"
# An answer ends where the next example would begin.
STOP = ["\n\n", "Question:"]
_ANSWER = re.compile(r"####\s*\$?\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)")


class Example(msgspec.Struct, frozen=True):
    """A question and its worked answer, which ends in ``#### NUMBER``."""

    question: str
    answer: str


def fetched(name: str, folder: Path = _CACHE) -> Path:
    """Return the data set's file ``test`` or ``train``; fetch it the first time.

    Raises:
        ProbeError: It is not there, and the network does not give it.
    """
    path = folder / f"{name}.jsonl"
    if path.exists():
        return path
    url = f"{_SOURCE}/{name}.jsonl"
    try:
        answer = httpx.get(url, timeout=60, follow_redirects=True).raise_for_status()
    except httpx.HTTPError as error:
        raise ProbeError(
            f"Cannot fetch {url} ({error}); give the data set's files with --dataset "
            "and --shots-from"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(answer.content)
    partial.rename(path)
    return path


def read_examples(path: Path) -> list[Example]:
    """Read a GSM8K file, one JSON object a line.

    Raises:
        ProbeError: It cannot be read, is empty, or a line is no example.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ProbeError(f"Cannot read the dataset {path}: {error.strerror}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            example = msgspec.json.decode(line, type=Example)
        except msgspec.DecodeError as error:
            raise ProbeError(
                f"Line {number} of the dataset {path} is cut or no GSM8K example: "
                f"{error}"
            ) from error
        if extract_answer(example.answer) is None:
            raise ProbeError(
                f"Line {number} of the dataset {path} has an answer without '#### "
                "NUMBER'"
            )
        examples.append(example)
    if not examples:
        raise ProbeError(f"The dataset {path} is empty")
    return examples


def extract_answer(text: str) -> str | None:
    """Return the number after the first ``####``, normalised; None: there is none.

    ``"... #### 1,250.00"`` gives ``"1250"``.
    """
    found = _ANSWER.search(text)
    if found is None:
        return None
    number = found[1].replace(",", "")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return number


def shared_prefix(shots: list[Example]) -> str:
    """Return what every prompt starts with."""
    return "".join(
        f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots
    )


def prompt_for(prefix: str, question: str, instruction: str) -> str:
    """Return the whole prompt; an empty instruction leaves it out."""
    middle = f"{instruction}\n" if instruction else ""
    return f"{prefix}Question: {question}\n{middle}Answer:"


def fingerprint(*texts: str) -> str:
    """Return a short digest by which two runs know that they asked the same."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]

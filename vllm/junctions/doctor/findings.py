# SPDX-License-Identifier: Apache-2.0
"""What the doctor says: one line a finding, with what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One checked thing.

    Attributes:
        level: How bad it is.
        subject: What was looked at, in one or two words.
        text: What was found.
        mend: What to do; empty where nothing has to be done.
    """

    level: Level
    subject: str
    text: str
    mend: str = ""

    def __str__(self) -> str:
        mend = f" -> {self.mend}" if self.mend else ""
        line = f"{self.level.value:<4}  {self.subject}: {self.text}{mend}"
        return " ".join(line.splitlines())


def ok(subject: str, text: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, mend: str) -> Finding:
    """Return a finding that may be the cause of missing hits, or may be wanted."""
    return Finding(Level.WARN, subject, text, mend)


def fail(subject: str, text: str, mend: str) -> Finding:
    """Return a finding that keeps junctions, or the store, from working."""
    return Finding(Level.FAIL, subject, text, mend)


def summary(findings: Iterable[Finding]) -> str:
    """Return the lines that sum everything up: what failed, or that nothing did."""
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    if not failed:
        return "Nothing failed."
    lines = [f"Mend this first ({len(failed)} failed):"]
    return "\n".join(lines + [f"  {one.subject}: {one.text}" for one in failed])


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if anything failed, otherwise 0."""
    return int(any(finding.level is Level.FAIL for finding in findings))

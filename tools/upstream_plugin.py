# SPDX-License-Identifier: Apache-2.0
"""pytest plugin inside the runs of vLLM's suites: hooks on, outcomes to a file.

Loaded with ``-p``, before any conftest or test module is imported, so that what
these import is what ``enable()`` left behind.

    UPSTREAM_OUTCOMES   file that gets one JSON line per test
    UPSTREAM_ENABLE     1: apply ``tools.everywhere.enable()`` first
    UPSTREAM_VERSION    the vLLM that must be running, for example 0.33.0
"""

import gc
import json
import os
import sys
from typing import Any

import pytest

if os.environ.get("UPSTREAM_ENABLE") == "1":
    from everywhere import enable

    enable()


class OutcomeWriter:
    """Writes a test's outcome when its teardown is through.

    Line by line and flushed: if the process dies, the file tells which test was
    the last one that ended.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        # A failure in any phase is the outcome; "passed" comes from the call only.
        counts = outcome != "passed" or report.when == "call"
        known = self._outcomes.get(report.nodeid, ("", ""))
        if counts and known[0] != "failed":
            self._outcomes[report.nodeid] = (outcome, _reason(report))
        if report.when == "teardown":
            self._write(report.nodeid, *self._outcomes.pop(report.nodeid))

    def pytest_collectreport(self, report: Any) -> None:
        # A module that cannot be imported has no tests; it stands for them.
        if report.outcome != "passed":
            self._write(report.nodeid, report.outcome, _reason(report))

    def _write(self, test_id: str, outcome: str, reason: str) -> None:
        line = {"test_id": test_id, "outcome": outcome, "reason": reason}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def pytest_collection_finish() -> None:
    """Keep garbage collection quick.

    The suites' conftest collects garbage after every test, unfrozen garbage
    included. Walking all that torch and transformers define takes a second each
    time; frozen for good, it is passed over.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def pytest_sessionfinish(session: Any) -> None:
    """Break the run off if it was not what its label says."""
    expected = os.environ.get("UPSTREAM_VERSION")
    found = sys.modules["vllm.version"].__version__.split("+")[0]
    if expected and found != expected:
        pytest.exit(f"vLLM {found} was running, not {expected}", returncode=3)
    if hooks_are_on() != (os.environ.get("UPSTREAM_ENABLE") == "1"):
        pytest.exit(f"hooks on: {hooks_are_on()}", returncode=3)


def hooks_are_on() -> bool:
    """Whether this process has our hooks, asked without importing the package."""
    hooks = sys.modules.get("vllm.junctions.core")
    return hooks is not None and bool(hooks.CORE_HOOKS.installed)


def _reason(report: Any) -> str:
    if report.outcome == "passed" or not report.longrepr:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:400]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:400]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: Any) -> None:
    path = os.environ.get("UPSTREAM_OUTCOMES")
    if path:
        config.pluginmanager.register(OutcomeWriter(path), "upstream-outcomes")

# SPDX-License-Identifier: Apache-2.0
"""What two runs of the same suites say about each other: no I/O, no vLLM."""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

# Fewer than this, and the suites did not really run.
MIN_PASSED = 1100
# Outcome of a test that one run has no line for: it died, or did not collect it.
MISSING = "missing"
# Outcome on stock of a test that passes with the hooks on, and so cannot be worse.
NOT_RUN = "not run"


class Outcome(msgspec.Struct, frozen=True):
    """How one test ended, as ``upstream_plugin`` writes it.

    A module that cannot be imported counts as one failed test under its own name.
    """

    test_id: str
    outcome: str
    reason: str = ""


class Difference(msgspec.Struct, frozen=True):
    """A test whose two runs ended differently."""

    test_id: str
    stock: str
    enabled: str
    reason: str

    @property
    def is_regression(self) -> bool:
        """Whether stock passes and the hooks break it."""
        return self.stock == "passed"


class VersionResult(msgspec.Struct):
    """One version's entry in ``upstream.json``."""

    stock_passed: int
    enabled_passed: int
    differs: list[str]


Run = Mapping[str, Outcome]


def parse(lines: Iterable[str | bytes]) -> dict[str, Outcome]:
    """Read a run's JSON lines; of several lines for one test, the worst stays."""
    run: dict[str, Outcome] = {}
    for line in lines:
        outcome = msgspec.json.decode(line, type=Outcome)
        known = run.get(outcome.test_id)
        if known is None or known.outcome != "failed":
            run[outcome.test_id] = outcome
    return run


def counts(run: Run) -> Counter[str]:
    return Counter(outcome.outcome for outcome in run.values())


def differences(stock: Run, enabled: Run) -> list[Difference]:
    """Every test whose outcome is not the same in both runs, sorted by name."""
    found = []
    for test_id in sorted({*stock, *enabled}):
        absent = Outcome(test_id, MISSING, "no outcome was recorded")
        before, after = stock.get(test_id, absent), enabled.get(test_id, absent)
        if before.outcome not in (after.outcome, NOT_RUN):
            reason = after.reason or before.reason
            found.append(Difference(test_id, before.outcome, after.outcome, reason))
    return found


def without_passed(enabled: Run) -> dict[str, Outcome]:
    """What stock need not be asked, as its outcomes: the tests that pass anyway."""
    return {
        test_id: Outcome(test_id, NOT_RUN)
        for test_id, outcome in enabled.items()
        if outcome.outcome == "passed"
    }


def fail_on_both(stock: Run, enabled: Run) -> list[Outcome]:
    """Tests that cannot pass on such a machine, with stock's reason."""
    return [
        outcome
        for test_id, outcome in sorted(stock.items())
        if outcome.outcome == "failed"
        and test_id in enabled
        and enabled[test_id].outcome == "failed"
    ]


def result(stock: Run, enabled: Run) -> VersionResult:
    return VersionResult(
        stock_passed=counts(stock)["passed"],
        enabled_passed=counts(enabled)["passed"],
        differs=[difference.test_id for difference in differences(stock, enabled)],
    )


def problems(
    version: str, stock: Run, enabled: Run, min_passed: int = MIN_PASSED
) -> list[str]:
    """Reasons why the target fails; empty when all is well."""
    found = []
    for run_name, run in (("stock", stock), ("enabled", enabled)):
        found_of_run = counts(run)
        if found_of_run["passed"] + found_of_run[NOT_RUN] < min_passed:
            found.append(
                f"{version}: {run_name} passes {found_of_run['passed']} tests, "
                f"at least {min_passed} must"
            )
    found += [
        f"{version}: passes on stock, {difference.enabled} with hooks on: "
        f"{difference.test_id}"
        for difference in differences(stock, enabled)
        if difference.is_regression
    ]
    return found


def closing_line(runs: Iterable[Run], num_differing: int) -> str:
    """Totals of all runs, in pytest's words."""
    total: Counter[str] = Counter()
    num_runs = 0
    for run in runs:
        total += counts(run)
        num_runs += 1
    names = ["passed", "failed", *sorted(set(total) - {"passed", "failed"})]
    totals = ", ".join(f"{total[name]} {name}" for name in names)
    return f"{totals} in {num_runs} runs; {num_differing} outcomes differ"

# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from tools.upstream_outcomes import (
    MISSING,
    NOT_RUN,
    Outcome,
    closing_line,
    differences,
    fail_on_both,
    parse,
    problems,
    result,
    without_passed,
)


def run_of(**outcome_by_test):
    return {
        name: Outcome(name, outcome, f"{name} {outcome}")
        for name, outcome in outcome_by_test.items()
    }


def line(test_id, outcome, reason=""):
    return json.dumps({"test_id": test_id, "outcome": outcome, "reason": reason})


def test_parse_reads_one_outcome_a_line():
    run = parse([line("a", "passed"), line("b", "skipped", "no GPU")])
    assert run == {"a": Outcome("a", "passed"), "b": Outcome("b", "skipped", "no GPU")}


def test_a_failure_is_not_overwritten_by_a_later_line_of_the_same_test():
    assert parse([line("a", "failed"), line("a", "passed")])["a"].outcome == "failed"
    assert parse([line("a", "passed"), line("a", "failed")])["a"].outcome == "failed"


def test_a_line_that_is_no_outcome_is_an_error():
    with pytest.raises(ValueError, match="outcome"):
        parse(['{"test_id": "a"}'])


def test_equal_runs_do_not_differ():
    run = run_of(a="passed", b="failed", c="skipped")
    assert differences(run, dict(run)) == []


@pytest.mark.parametrize(
    ("before", "after", "is_regression"),
    [
        ("passed", "failed", True),
        ("passed", "skipped", True),
        ("failed", "passed", False),
        ("skipped", "failed", False),
    ],
)
def test_every_change_differs_and_leaving_passed_is_a_regression(
    before, after, is_regression
):
    (difference,) = differences(run_of(a=before), run_of(a=after))
    assert (difference.stock, difference.enabled) == (before, after)
    assert difference.is_regression is is_regression
    assert difference.reason == f"a {after}"


def test_what_stock_was_not_asked_does_not_differ_and_counts_as_passed():
    enabled = run_of(a="passed", b="passed", c="failed", d="skipped")
    not_asked = without_passed(enabled)
    assert {outcome.outcome for outcome in not_asked.values()} == {NOT_RUN}
    assert list(not_asked) == ["a", "b"]
    stock = {**not_asked, **run_of(c="passed", d="skipped")}
    (difference,) = differences(stock, enabled)
    assert difference.test_id == "c"
    assert problems("0.32.0", stock, enabled, min_passed=2) == [
        "0.32.0: passes on stock, failed with hooks on: c"
    ]


def test_a_test_that_one_run_lacks_differs():
    vanished, appeared = differences(run_of(a="passed"), run_of(b="passed"))
    assert (vanished.test_id, vanished.enabled) == ("a", MISSING)
    assert vanished.is_regression
    assert (appeared.test_id, appeared.stock) == ("b", MISSING)
    assert not appeared.is_regression


def test_only_tests_that_fail_twice_fail_on_both():
    stock = run_of(a="failed", b="failed", c="passed", d="failed")
    enabled = run_of(a="failed", b="passed", c="failed")
    assert [outcome.test_id for outcome in fail_on_both(stock, enabled)] == ["a"]


def test_the_result_counts_passes_and_names_what_differs():
    stock = run_of(a="passed", b="passed", c="failed")
    enabled = run_of(a="passed", b="failed", c="passed")
    found = result(stock, enabled)
    assert (found.stock_passed, found.enabled_passed) == (2, 2)
    assert found.differs == ["b", "c"]


def test_no_problem_when_all_that_passed_still_passes():
    stock = run_of(a="passed", b="failed", c="failed")
    enabled = run_of(a="passed", b="failed", c="passed")
    assert problems("0.32.0", stock, enabled, min_passed=1) == []


def test_a_regression_is_a_problem_that_names_the_test():
    (problem,) = problems(
        "0.33.0",
        run_of(a="passed", b="passed"),
        run_of(a="passed", b="failed"),
        min_passed=1,
    )
    assert problem == "0.33.0: passes on stock, failed with hooks on: b"


@pytest.mark.parametrize("min_passed", [3, 1100])
def test_too_few_passes_are_a_problem_of_each_run(min_passed):
    run = run_of(a="passed", b="passed", c="failed")
    assert problems("0.32.0", run, run, min_passed) == [
        f"0.32.0: {name} passes 2 tests, at least {min_passed} must"
        for name in ("stock", "enabled")
    ]


def test_exactly_the_threshold_is_enough():
    run = run_of(a="passed", b="passed")
    assert problems("0.32.0", run, run, min_passed=2) == []


def test_the_closing_line_adds_up_all_runs():
    runs = [run_of(a="passed", b="failed"), run_of(a="passed", b="passed", c="skipped")]
    assert closing_line(runs, num_differing=1) == (
        "3 passed, 1 failed, 1 skipped in 2 runs; 1 outcomes differ"
    )

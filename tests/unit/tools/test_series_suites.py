# SPDX-License-Identifier: Apache-2.0
"""What the runs of vLLM's suites on a release and on its patched tree tell."""

from tools.series.records import SERIES
from tools.series.suites import beyond, differing, failing_of_ours
from tools.upstream_outcomes import Outcome


def outcomes(**by_id: str) -> dict[str, Outcome]:
    return {test_id: Outcome(test_id, how, "") for test_id, how in by_id.items()}


def test_a_test_that_fails_on_the_patched_tree_alone_is_named() -> None:
    stock = outcomes(a="passed", b="failed")

    assert differing(stock, outcomes(a="failed", b="failed")) == ["a"]


def test_the_series_own_tests_are_no_difference() -> None:
    own = f"{SERIES[0].new_files[0]}::test_it"

    assert (
        differing(outcomes(a="passed"), outcomes(a="passed", **{own: "passed"})) == []
    )


def test_a_test_that_is_gone_is_a_difference() -> None:
    assert differing(outcomes(a="passed"), {}) == ["a"]


def test_a_test_of_the_series_that_fails_is_named() -> None:
    own = SERIES[0].new_files[0]
    tests = outcomes(a="failed", **{f"{own}::a": "failed", f"{own}::b": "passed"})

    assert failing_of_ours(tests) == [f"{own}::a"]
    # A module that cannot be imported.
    assert failing_of_ours(outcomes(**{own: "failed"})) == [own]


def test_what_a_folder_of_the_selection_holds_is_not_selected_twice() -> None:
    assert beyond(["tests/a", "tests/b/t.py"], ["tests/a/b/t.py", "tests/b/u.py"]) == [
        "tests/b/u.py"
    ]

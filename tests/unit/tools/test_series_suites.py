# SPDX-License-Identifier: Apache-2.0
"""What the runs of vLLM's suites on a release and on its patched tree tell."""

from tools.series.records import SERIES
from tools.series.suites import differing
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

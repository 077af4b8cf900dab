# SPDX-License-Identifier: Apache-2.0
"""vLLM's own suites on a release and on its patched tree, side by side."""

import ast
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools import upstream
from tools import upstream_outcomes as outcomes
from tools.series.apply import Applied
from tools.series.records import SERIES
from tools.upstream import SuiteRun
from tools.upstream_hub import write_hub
from tools.vllm_tree import tree

# The series touches this connector, which the overlay leaves alone.
OFFLOADING = "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py"
_PATCHED = "patched"


@dataclass(frozen=True)
class Compared:
    """Both runs of one version's suites.

    Attributes:
        stock: Outcomes by test id, on the release.
        patched: The same on the patched tree, the series' own tests included.
        changed: Tests whose text the series changes, parameters left out.
        broken_off: Names of runs that did not come to their end.
    """

    stock: dict[str, outcomes.Outcome]
    patched: dict[str, outcomes.Outcome]
    changed: list[str]
    broken_off: list[str]

    @property
    def differs(self) -> list[str]:
        """Tests of the release that end otherwise on the patched tree."""
        return differing(self.stock, self.patched)

    @property
    def failing(self) -> list[str]:
        """Tests of the series' own that do not pass."""
        return failing_of_ours(self.patched)


def failing_of_ours(tests: dict[str, outcomes.Outcome]) -> list[str]:
    """Return the ids of the series' own tests that do not pass."""
    return [
        test_id
        for test_id, outcome in sorted(tests.items())
        if outcome.outcome != "passed" and _is_ours(test_id)
    ]


def _is_ours(test_id: str) -> bool:
    # A module that cannot be imported is a test under its own name.
    return test_id.split("::")[0] in {p for c in SERIES for p in c.new_files}


def differing(
    stock: dict[str, outcomes.Outcome], patched: dict[str, outcomes.Outcome]
) -> list[str]:
    """Return the ids of tests that end otherwise; the series' own are no such tests."""
    return [
        difference.test_id
        for difference in outcomes.differences(stock, patched)
        if not _is_ours(difference.test_id)
    ]


def compare(applied: Applied, runtime: Path, only: Sequence[str] = ()) -> Compared:
    """Run the suites on both sides; what differs runs once more, by itself.

    Args:
        applied: The patched tree.
        runtime: Folder for ``PYTHONPATH`` that brings the patched vLLM.
        only: Test files in place of the usual selection.
    """
    version = applied.version
    folder = upstream.prepare(version)
    write_hub(upstream.WORK / "hub")
    stock = SuiteRun(version, "stock")
    patched = SuiteRun(version, _PATCHED, runtime=runtime, tests_of=_PATCHED)
    upstream.lay_out(applied.tree, patched.folder)
    present = [*(only or (*upstream.suites_of(folder)[0], OFFLOADING))]
    new = [path for commit in SERIES for path in commit.new_files]
    first = _run(stock, patched, present, [] if only else new)
    again: list[SuiteRun] = []
    unlike = differing(first[0].tests, first[1].tests)
    if 0 < len(unlike) <= upstream.MAX_REPEATED:
        again = _run(
            SuiteRun(version, "stock", "-repeated"),
            SuiteRun(version, _PATCHED, "-repeated", runtime, _PATCHED),
            unlike,
        )
    tests = [
        {**run.tests, **(again[index].tests if again else {})}
        for index, run in enumerate(first)
    ]
    broken_off = [
        run.name for run in (*first, *again) if run.exit_code not in upstream.COMPLETE
    ]
    return Compared(*tests, changed_tests(applied), broken_off)


def _run(
    stock: SuiteRun,
    patched: SuiteRun,
    selection: Sequence[str],
    only_patched: Sequence[str] = (),
) -> list[SuiteRun]:
    with ThreadPoolExecutor(2) as pool:
        selections = [selection, [*selection, *beyond(selection, only_patched)]]
        return list(pool.map(upstream.run_suites, [stock, patched], selections))


def beyond(selection: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return those of ``paths`` that lie in none of the selection's folders."""
    folders = tuple(f"{folder}/" for folder in selection)
    return [path for path in paths if not path.startswith(folders)]


def changed_tests(applied: Applied) -> list[str]:
    """Return the tests of vLLM whose text the series changes, as ``file::name``.

    A helper that tests share stands in the list by its own name.
    """
    changed = []
    for path in sorted({p for c in SERIES for p in c.files(applied.version)}):
        if path.startswith("tests/"):
            before = _functions(tree(applied.version) / path)
            after = _functions(applied.tree / path)
            names = sorted(n for n in before if before[n] != after.get(n))
            changed += [f"{path}::{name}" for name in names]
    return changed


def _functions(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}::")
            elif isinstance(child, ast.FunctionDef):
                found[prefix + child.name] = ast.dump(child)

    visit(ast.parse(path.read_text()), "")
    return found

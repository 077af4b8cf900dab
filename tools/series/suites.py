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
_OFFLOADING = "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py"
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


def differing(
    stock: dict[str, outcomes.Outcome], patched: dict[str, outcomes.Outcome]
) -> list[str]:
    """Return the ids of tests that end otherwise; the series' own are no such tests."""
    new = tuple(f"{path}::" for commit in SERIES for path in commit.new_files)
    return [
        difference.test_id
        for difference in outcomes.differences(stock, patched)
        if not difference.test_id.startswith(new)
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
    present = [*(only or (*upstream.suites_of(folder)[0], _OFFLOADING))]
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
    # Folders among the selection hold some of the new files already.
    extra = [
        path
        for path in only_patched
        if not any(path.startswith(f"{folder}/") for folder in selection)
    ]
    with ThreadPoolExecutor(2) as pool:
        selections = [selection, [*selection, *extra]]
        return list(pool.map(upstream.run_suites, [stock, patched], selections))


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

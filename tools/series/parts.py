# SPDX-License-Identifier: Apache-2.0
"""Each commit by itself: vLLM's suites of core and store on every part of the series.

A part is a beginning of the series, as a bisection meets it, or the feature with one
commit that can be left out. The whole series is no part: :mod:`tools.series.check` has
it.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tools import upstream
from tools import upstream_outcomes as outcomes
from tools.series.apply import texts_by_commit
from tools.series.edits import Commit
from tools.series.records import NUM_REQUIRED, SERIES
from tools.series.suites import OFFLOADING, beyond, differing, failing_of_ours
from tools.upstream import SuiteRun
from tools.upstream_hub import write_hub
from tools.vllm_tree import CACHE, runtime, runtime_of
from tools.vllm_tree import tree as source_tree

_AT_ONCE = 2


def parts() -> dict[str, tuple[Commit, ...]]:
    """Return the commits of every part, by its name."""
    feature = SERIES[:NUM_REQUIRED]
    beginnings = {f"1-{n}": SERIES[:n] for n in range(1, len(SERIES))}
    # The first one that can be left out makes a beginning.
    alone = {
        f"1-{NUM_REQUIRED}+{commit.name}": (*feature, commit)
        for commit in SERIES[NUM_REQUIRED + 1 :]
    }
    return beginnings | alone


def make_tree(version: str, commits: tuple[Commit, ...], folder: Path) -> Path:
    """Lay out the release with ``commits`` in ``folder``: Python and tests alone.

    What they leave alone is linked to the release's files.
    """
    shutil.rmtree(folder, ignore_errors=True)
    source = source_tree(version)
    for name in ("vllm", "tests"):
        shutil.copytree(source / name, folder / name, copy_function=os.link)
    for _, texts in texts_by_commit(source, version, commits):
        for path, text in texts.items():
            # A link's file is the release's own.
            (folder / path).unlink(missing_ok=True)
            (folder / path).write_text(text)
    return folder


def check(version: str) -> tuple[dict[str, int], list[str]]:
    """Run the suites on the release and on each part.

    Returns:
        Tests that pass, by part, and a line for each that passes on the release and
        not on the part, or is the series' own and does not pass.
    """
    selection = _selection(upstream.prepare(version))
    write_hub(upstream.WORK / "hub")
    # Without compiled code on either side, so that they differ in the series alone.
    stock = SuiteRun(version, "stock", "-parts", runtime=runtime(version))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        release = pool.submit(upstream.run_suites, stock, selection)
        running = {
            name: pool.submit(_run, version, name, commits, selection)
            for name, commits in parts().items()
        }
    found = release.result()
    passed, problems = {}, _broken_off(found)
    for name, future in running.items():
        passed[name], lines = _compare(found, future.result())
        problems += [f"{name}: {line}" for line in lines]
    return passed, problems


def _selection(folder: Path) -> list[str]:
    ours = ("tests/v1/core", "tests/v1/kv_connector/unit/test_mooncake_")
    present = upstream.suites_of(folder)[0]
    return [*(name for name in present if name.startswith(ours)), OFFLOADING]


def _run(
    version: str, name: str, commits: tuple[Commit, ...], selection: list[str]
) -> SuiteRun:
    tree = make_tree(version, commits, CACHE / "parts" / f"{version}-{name}")
    folder = runtime_of(tree, version, CACHE / "parts" / f"runtime-{version}-{name}")
    side = f"part-{name}"
    run = SuiteRun(version, side, runtime=folder, tests_of=side)
    upstream.lay_out(tree, run.folder)
    new = [path for commit in commits for path in commit.new_files]
    return upstream.run_suites(run, [*selection, *beyond(selection, new)])


def _compare(stock: SuiteRun, run: SuiteRun) -> tuple[int, list[str]]:
    tests = run.tests
    unlike = [*differing(stock.tests, tests), *failing_of_ours(tests)]
    if 0 < len(unlike) <= upstream.MAX_REPEATED:
        # By themselves: a busy machine lets some of them time out.
        again = upstream.run_suites(replace(run, label="-repeated"), unlike)
        tests = {**tests, **again.tests}
    lines = _broken_off(run)
    lines += [
        f"ends otherwise than on stock: {t}" for t in differing(stock.tests, tests)
    ]
    lines += [f"does not pass: {test}" for test in failing_of_ours(tests)]
    return outcomes.counts(tests)["passed"], lines


def _broken_off(run: SuiteRun) -> list[str]:
    if run.exit_code in upstream.COMPLETE:
        return []
    return [f"{run.name} broke off (exit code {run.exit_code}), see {run.log}"]

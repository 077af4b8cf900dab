# SPDX-License-Identifier: Apache-2.0
"""Everything that has to hold of the patched trees, without the overlay.

``make test-patched``: for each version the seed table, the laws, engine tests, and
vLLM's own suites stock beside patched; where the compiled vLLM of that version is
installed, the demo end to end. ``EACH=1``: vLLM's suites of core and store on each
beginning of the series and on each commit that can be left out, instead. Writes
``benchmarks/results/patched.json``.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from tools import upstream
from tools import upstream_outcomes as outcomes
from tools.series import parts, suites
from tools.series.apply import Applied, patched_tree
from tools.series.git import BRANCH, Git
from tools.series.installed import patched_installation
from tools.series.records import NUM_REQUIRED, SERIES, VERSIONS
from tools.vllm_tree import CACHE, runtime_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "patched.json"

# Engine tests that say "on" and ask for nothing of this package.
ENGINE_TESTS = (
    "tests/engine/test_mamba.py",
    "tests/engine/test_modes.py",
    "tests/engine/test_multi_layer_mtp.py",
    "tests/engine/test_field_bugs.py",
)
# What they need of this package, or of a stock vLLM in the same process.
NOT_HERE = " or ".join(
    (
        *("stock", "off", "loaded", "store_mask", "lookups_ask", "recording"),
        *("test_06", "test_09", "test_14"),
    )
)
# Processes of pytest: about what two processors can do.
AT_ONCE = 2
LAWS = ("test_nothing_wrong", "test_nothing_missed")


class PatchedResult(msgspec.Struct, kw_only=True):
    """What was found of one version.

    Attributes:
        files: Files of vLLM itself that the feature changes.
        lines_added: Lines that commits 1 to 3 add to them, tests aside.
        lines_removed: Lines that these remove.
        by_commit: ``(added, removed)`` by name of every commit, tests aside.
        stock_passed: Tests of vLLM's suites that pass on the release.
        patched_passed: The same on the patched tree, the series' own included.
        differs: Tests that pass on the release and do not on the patched tree.
        changed_by_series: Tests and helpers of vLLM that the series changes.
        seed_table: Hits of the store by ``tokens past the prefix`` and request.
        examples: Examples that each law held for.
        demo: Hits of the demo's requests, where it could run: ``(stock, patched)``.
        parts: Tests of core and store that pass on parts of the series, by part.
    """

    files: int
    lines_added: int
    lines_removed: int
    by_commit: dict[str, tuple[int, int]]
    stock_passed: int = 0
    patched_passed: int = 0
    differs: list[str] = []
    changed_by_series: list[str] = []
    seed_table: dict[str, dict[str, int]] = {}
    examples: int = 0
    demo: dict[str, tuple[int, int]] = {}
    parts: dict[str, int] = {}


def size_of(applied: Applied) -> PatchedResult:
    """Count what the series changes in vLLM itself."""
    git = Git(applied.tree)
    commits = git("rev-list", "--reverse", f"release..{BRANCH}").splitlines()
    by_commit: dict[str, tuple[int, int]] = {}
    files: set[str] = set()
    for number, (commit, revision) in enumerate(zip(SERIES, commits, strict=True)):
        shown = git("show", "--numstat", "--format=", revision, "--", "vllm")
        rows = [line.split("\t") for line in shown.splitlines()]
        by_commit[commit.name] = (
            sum(int(row[0]) for row in rows),
            sum(int(row[1]) for row in rows),
        )
        if number < NUM_REQUIRED:
            files |= {row[2] for row in rows}
    required = [by_commit[commit.name] for commit in SERIES[:NUM_REQUIRED]]
    return PatchedResult(
        files=len(files),
        lines_added=sum(added for added, _ in required),
        lines_removed=sum(removed for _, removed in required),
        by_commit=by_commit,
    )


def environment(runtime: Path, examples: int) -> dict[str, str]:
    """Return the environment of a process that has the patched vLLM."""
    return {
        **os.environ,
        "PYTHONPATH": str(runtime),
        "PYTHONHASHSEED": "0",
        "VLLM_PLUGINS": "",
        "JUNCTIONS_SIDE": "patched",
        "JUNCTIONS_EXAMPLES": str(examples),
    }


def seed_table(env: dict[str, str]) -> dict[str, dict[str, int]]:
    """Return what the seed table's requests hit on the patched vLLM."""
    code = (
        "import json; from benchmarks import seed_table as t; print(json.dumps({"
        "row[0]: {r.name: r.store_hit_tokens for r in "
        "t.run_side('on', row[0], t.TAIL_TOKENS)} for row in t.EXPECTED}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**env, "PYTHONPATH": os.pathsep.join((env["PYTHONPATH"], str(ROOT)))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_tests(env: dict[str, str]) -> list[str]:
    """Run the project's own tests on the patched vLLM; say what failed."""
    chosen: list[Sequence[str]] = [
        ["tests/patched"],
        *([f"tests/property/test_laws.py::{law}"] for law in LAWS),
        [*ENGINE_TESTS, "-k", f"not ({NOT_HERE})"],
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [
            line for lines in pool.map(partial(_pytest, env), chosen) for line in lines
        ]


def _pytest(env: dict[str, str], arguments: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    # In one piece: others run beside it.
    print(f"pytest {' '.join(arguments)}\n{done.stdout}", flush=True)
    return [f"pytest {' '.join(arguments)} failed"] if done.returncode else []


def run_demo() -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Run the demo end to end, stock and patched."""
    results = CACHE / "demo-patched.json"
    command = [sys.executable, "-m", "benchmarks.demo", "--patched"]
    status = subprocess.run(
        [*command, "--json", str(results)], cwd=ROOT, check=False
    ).returncode
    if status:
        return {}, ["the demo failed"]
    rows = json.loads(results.read_text())
    pairs = zip(rows["stock"], rows["junctions"], strict=True)
    hits = {
        f"{before['name']} d={before['diverge_tokens']}": (
            before["store_hit_tokens"],
            after["store_hit_tokens"],
        )
        for before, after in pairs
    }
    return hits, []


def check(version: str, examples: int, suites_too: bool) -> tuple[PatchedResult, list]:
    """Check one version; return what was found and what is wrong."""
    applied = patched_tree(version)
    is_compiled = version == upstream.installed_version()
    runtime = runtime_of(applied.tree, version, CACHE / f"runtime-patched-{version}")
    env = environment(runtime, examples)
    result = size_of(applied)
    print(f"\nvLLM {version}, patched: seed table", flush=True)
    result.seed_table = seed_table(env)
    problems = run_tests(env)
    result.examples = examples
    if suites_too:
        here = patched_installation(applied) if is_compiled else runtime
        compared = suites.compare(applied, here)
        result.stock_passed = outcomes.counts(compared.stock)["passed"]
        result.patched_passed = outcomes.counts(compared.patched)["passed"]
        result.differs, result.changed_by_series = compared.differs, compared.changed
        problems += [f"{name} broke off" for name in compared.broken_off]
        problems += [f"passes on stock alone: {test}" for test in compared.differs]
        problems += [f"of the series, fails: {test}" for test in compared.failing]
    if is_compiled:
        result.demo, found = run_demo()
        problems += found
    return result, [f"{version}: {problem}" for problem in problems]


def check_parts(
    version: str, earlier: PatchedResult | None
) -> tuple[PatchedResult, list]:
    """Check each commit alone; add what was found to an ``earlier`` result."""
    print(f"\nvLLM {version}: parts of the series", flush=True)
    result = earlier or size_of(patched_tree(version))
    result.parts, problems = parts.check(version)
    return result, [f"{version}: {problem}" for problem in problems]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--examples", type=int, default=1000, help="of each law")
    parser.add_argument("--without-suites", action="store_true")
    parser.add_argument(
        "--parts", action="store_true", help="each commit alone instead"
    )
    args = parser.parse_args(argv)
    results: dict[str, PatchedResult] = {}
    if RESULTS.exists():
        results = msgspec.json.decode(
            RESULTS.read_bytes(), type=dict[str, PatchedResult]
        )
    problems = []
    for version in args.versions:
        if args.parts:
            results[version], found = check_parts(version, results.get(version))
        else:
            results[version], found = check(
                version, args.examples, not args.without_suites
            )
        problems += found
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
    print(f"\nwritten: {RESULTS.relative_to(ROOT)}")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

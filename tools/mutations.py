# SPDX-License-Identifier: Apache-2.0
"""Plant bugs in copies of the package; the tests must catch every one.

``make mutants`` runs it. Each bug is a replacement in one file, see
``planted_bugs.py``. The tests run on an untouched copy first: they have to pass there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tools.planted_bugs import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm" / "junctions"


def plant(mutation: Mutation, package: Path) -> None:
    """Apply a mutation to a copy of the package.

    Raises:
        ValueError: The text to replace is not there exactly once.
    """
    path = package / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name!r}: the text to replace is {text.count(mutation.old)} "
            f"times in {mutation.file}; bring the mutation up to date"
        )
    path.write_text(text.replace(mutation.old, mutation.new))


def run_tests(package: Path, tests: Iterable[str]) -> tuple[bool, str]:
    """Run tests, and the servers that they start, on a copy of the package.

    Returns:
        Whether they passed, and the first that failed.

    Raises:
        RuntimeError: pytest did not get as far as to run them.
    """
    # Python runs a ``sitecustomize`` on its path at the start of every process.
    (package.parent / "sitecustomize.py").write_text("import tools.mutant_import\n")
    paths = [str(package.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "--tb=no"),
            *("-p", "no:cacheprovider", *tests),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "JUNCTIONS_PACKAGE": str(package),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest did not run:\n{done.stdout}\n{done.stderr}")
    lines = [
        line.removeprefix("FAILED ").removeprefix("ERROR ")
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    return done.returncode == 0, lines[0] if lines else ""


def check(mutation: Mutation | None, tests: Iterable[str]) -> tuple[bool, str]:
    """Return whether the tests pass with ``mutation`` planted, and what failed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        package = Path(directory) / "junctions"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            plant(mutation, package)
        return run_tests(package, tests)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="part of a mutation's name")
    args = parser.parse_args(argv)
    mutations = [one for one in MUTATIONS if args.only in one.name]
    if not mutations:
        parser.error(f"no mutation's name has {args.only!r} in it")
    all_tests = {test for one in mutations for run in one.runs for test in run}
    passed, failed_test = check(None, sorted(all_tests))
    if not passed:
        print(f"The tests fail without any planted bug: {failed_test}")
        return 1
    print("no bug planted: the tests pass", flush=True)
    survivors = 0
    for mutation in mutations:
        for tests in mutation.runs:
            passed, failed_test = check(mutation, tests)
            survivors += passed
            outcome = (
                f"SURVIVES {' '.join(tests)}" if passed else f"caught by {failed_test}"
            )
            print(f"{mutation.name}: {outcome}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

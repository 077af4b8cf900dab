# SPDX-License-Identifier: Apache-2.0
"""Plant bugs in copies of the package; the tests must catch every one.

``make mutants`` runs it. Each bug is a replacement in one file. The tests run on an
untouched copy first: they have to pass there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm" / "junctions"
TESTS = (
    "tests/engine/test_field_bugs.py",
    "tests/engine/test_mamba.py",
    "tests/engine/test_faults.py",
)
LOOKUP_TESTS = ("tests/unit/test_two_phase.py", "tests/property/test_lookups.py")


@dataclass(frozen=True)
class Mutation:
    """One planted bug.

    Attributes:
        name: What it does, in words.
        file: File in the package.
        old: Text that is there exactly once.
        new: Text that takes its place.
        tests: What has to catch it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = TESTS


MUTATIONS = (
    Mutation(
        "skip the null-block check",
        "worker.py",
        "logger = init_logger(__name__)\n",
        "logger = init_logger(__name__)\n\n"
        "import vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker "
        "as _stock\n\n_stock.NULL_BLOCK_ID = -1\n",
    ),
    Mutation(
        "drop the proof block",
        "coordinator.py",
        "            tails = super().store_mask(\n"
        "                aligned_token_len,\n"
        "                start_token,\n"
        "                self._prompt_replaying_at(position),\n"
        "            )\n",
        "            eagle, self.eagle_group_ids = self.eagle_group_ids, set()\n"
        "            tails = super().store_mask(\n"
        "                aligned_token_len,\n"
        "                start_token,\n"
        "                self._prompt_replaying_at(position),\n"
        "            )\n"
        "            self.eagle_group_ids = eagle\n",
    ),
    Mutation(
        "reuse a freed block: no pins while a save waits",
        "scheduler.py",
        "        assert isinstance(meta, MooncakeStoreConnectorMetadata)\n",
        "        assert isinstance(meta, MooncakeStoreConnectorMetadata)\n"
        "        pool = self._gpu_block_pool\n"
        "        for block_ids, _ in self._pinned_saves.values():\n"
        "            pool.free_blocks([pool.blocks[i] for i in block_ids])\n"
        "        self._pinned_saves.clear()\n",
    ),
    Mutation(
        "use the scalar instead of the tuple",
        "hooks/request.py",
        "    return request.__dict__.get(_UNION, ())\n",
        "    return request.__dict__.get(_UNION, ())[-1:]\n",
    ),
    Mutation(
        "forget junctions on resume",
        "scheduler.py",
        "        self._junction_tracker.discard(scheduler_output.finished_req_ids)\n",
        "        self._junction_tracker.discard(scheduler_output.finished_req_ids)\n"
        "        self._junction_tracker.discard(scheduler_output.preempted_req_ids "
        "or ())\n",
    ),
    Mutation(
        "EAGLE: keep the upper position only",
        "boundaries.py",
        "    if use_eagle:\n"
        "        positions.insert(0, longest_hit_length - scheduler_block_size)\n",
        "",
    ),
    Mutation(
        "keep junctions locally, store nothing there",
        "scheduler.py",
        "JunctionReqMeta.of(req_meta, self._junction_tracker.get(req_meta.req_id))",
        "JunctionReqMeta.of(req_meta, ())",
    ),
    Mutation(
        "ignore what the store reports",
        "scheduler.py",
        "            set_store_junctions(request, junctions)\n",
        "            set_store_junctions(request, ())\n",
    ),
    Mutation(
        "no Mamba stop at junctions but the last",
        "hooks/core_scheduler.py",
        "for j in shared_prefix_boundaries(request) or (0,)",
        "for j in shared_prefix_boundaries(request)[-1:] or (0,)",
    ),
    Mutation(
        "wait for lookups without a bound",
        "patience.py",
        "        socket.setsockopt(option, timeout_ms)\n",
        "        socket.setsockopt(option, _WITHOUT_BOUND)\n",
    ),
    Mutation(
        "wait the full time behind a silent server, again and again",
        "patience.py",
        "        return self._pause > 0 and self._clock() < self._paused_until\n",
        "        return False\n",
    ),
    Mutation(
        "never ask a silent server again",
        "patience.py",
        "        return self._pause > 0 and self._clock() < self._paused_until\n",
        "        return self._pause > 0\n",
    ),
    Mutation(
        "keep the socket of a lookup that was given up",
        "worker.py",
        "            self._replace_socket()\n",
        "",
    ),
    Mutation(
        "take hits that end within a block",
        "scheduler.py",
        "            else self._block_size,\n",
        "            else self._hash_block_size,\n",
    ),
    Mutation(
        "offer a hit again however often its load failed",
        "load_failures.py",
        "        return self._num_failed_by_request.get(req_id, 0) >= "
        "MAX_FAILED_LOADS\n",
        "        return False\n",
    ),
    Mutation(
        "overlook loads that fail by block",
        "scheduler.py",
        "            failed |= self._loading_into(invalid_block_ids)\n",
        "            self._loading_into(invalid_block_ids)\n",
    ),
    Mutation(
        "give up the store after the first failed load",
        "load_failures.py",
        "MAX_FAILED_LOADS = 2\n",
        "MAX_FAILED_LOADS = 1\n",
    ),
    Mutation(
        "leave a failed save's junctions to the next save",
        "worker.py",
        "        try:\n"
        "            super()._handle_request(req_meta)\n"
        "        finally:\n"
        "            self.coord, self.store, self._job = layout, store, None\n",
        "        super()._handle_request(req_meta)\n"
        "        self.coord, self.store, self._job = layout, store, None\n",
    ),
    Mutation(
        "take a part of a tail for the whole",
        "two_phase.py",
        "window.count(PRESENT) == end - first",
        "PRESENT in window",
        LOOKUP_TESTS,
    ),
    Mutation(
        "believe the first rank's answer for all",
        "known_keys.py",
        "done = PRESENT if all_ranks or len(stems) == 1 else FIRST",
        "done = PRESENT",
        LOOKUP_TESTS,
    ),
    Mutation(
        "let a later rank's yes overrule an earlier one's no",
        "known_keys.py",
        "                    elif states[unit] == ASKED:\n",
        "                    else:\n",
        LOOKUP_TESTS,
    ),
    Mutation(
        "forget that vLLM aligns a hit before it drops the proof block",
        "tails.py",
        "        if length < self.num_blocks[drop]:\n"
        "            length -= length % self.step\n",
        "",
        LOOKUP_TESTS,
    ),
    Mutation(
        "let what disproves another group's tail go on for the longest hit",
        "two_phase.py",
        "    pool.skips_positions = False\n",
        "",
        LOOKUP_TESTS,
    ),
    Mutation(
        "take a hit of the whole prompt",
        "two_phase.py",
        "    if hit_length >= num_tokens:\n",
        "    if hit_length > num_tokens:\n",
        LOOKUP_TESTS,
    ),
)


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


def run_tests(package: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Run the tests on a copy of the package; return (passed, last lines)."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "--tb=no"),
            *("-p", "tools.mutant_import", "-p", "no:cacheprovider", *tests),
        ],
        cwd=ROOT,
        env={**os.environ, "JUNCTIONS_PACKAGE": str(package)},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest did not run:\n{done.stdout}\n{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return done.returncode == 0, lines[0] if lines else ""


def check(mutation: Mutation | None, tests: tuple[str, ...]) -> tuple[bool, str]:
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
    for tests in dict.fromkeys(one.tests for one in mutations):
        passed, failed_test = check(None, tests)
        if not passed:
            print(f"The tests fail without any planted bug: {failed_test}")
            return 1
    print("no bug planted: the tests pass")
    survivors = 0
    for mutation in mutations:
        passed, failed_test = check(mutation, mutation.tests)
        survivors += passed
        outcome = "SURVIVES" if passed else f"caught by {failed_test[7:]}"
        print(f"{mutation.name}: {outcome}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

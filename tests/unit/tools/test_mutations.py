# SPDX-License-Identifier: Apache-2.0
"""Planted bugs fit the package as it is; that they are caught, `make mutants` shows."""

import ast
import shutil

import pytest

from tools.mutations import PACKAGE, ROOT, plant
from tools.planted_bugs import MUTATIONS, Mutation

FAULT_FILES = (
    "tests/engine/test_faults.py",
    "tests/engine/test_real_store.py",
    "tests/e2e/test_faults.py",
    "tests/e2e/test_late_transfers.py",
)
# In those files, but about what a fault test stands on, or about no fault.
NO_FAULTS = {
    "test_a_failed_load_that_goes_unreported_is_seen_by_the_box",
    "test_stock_asks_for_a_key_that_never_loads_without_end",
    "test_a_short_value_would_be_wrong_kv",
    "test_siblings_hit_as_on_the_stand_in",
    "test_mooncake_writes_into_the_memory_of_reads_that_it_gave_up",
    "test_mooncake_fails_puts_that_do_not_fit_its_queue",
}


@pytest.fixture
def package(tmp_path):
    return shutil.copytree(PACKAGE, tmp_path / "junctions")


def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_planted_bug_can_be_planted_and_leaves_valid_code(mutation, package):
    plant(mutation, package)
    text = (package / mutation.file).read_text()
    compile(text, mutation.file, "exec")
    assert text != (PACKAGE / mutation.file).read_text()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_what_has_to_catch_a_planted_bug_is_there(mutation):
    for tests in mutation.runs:
        for test in tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file()
            assert not name or name.partition("[")[0] in functions_in(file)


@pytest.mark.parametrize("file", FAULT_FILES)
def test_every_fault_test_is_tried_without_its_protection(file):
    tried = {
        fault.partition("::")[2].partition("[")[0]
        for mutation in MUTATIONS
        for fault in mutation.faults
        if fault.startswith(f"{file}::")
    }
    assert functions_in(file) - NO_FAULTS == tried


def test_a_planted_bug_that_no_longer_fits_is_an_error(package):
    stale = Mutation("stale", "store/worker.py", "no such text", "")
    with pytest.raises(ValueError, match="'stale': the text to replace is 0 times"):
        plant(stale, package)

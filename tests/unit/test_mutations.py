# SPDX-License-Identifier: Apache-2.0
"""Planted bugs fit the package as it is; that they are caught, `make mutants` shows."""

import shutil

import pytest

from tools.mutations import MUTATIONS, PACKAGE, ROOT, Mutation, plant


@pytest.fixture
def package(tmp_path):
    return shutil.copytree(PACKAGE, tmp_path / "junctions")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_planted_bug_can_be_planted_and_leaves_valid_code(mutation, package):
    plant(mutation, package)
    text = (package / mutation.file).read_text()
    compile(text, mutation.file, "exec")
    assert text != (PACKAGE / mutation.file).read_text()
    assert all((ROOT / test).is_file() for test in mutation.tests)


def test_a_planted_bug_that_no_longer_fits_is_an_error(package):
    stale = Mutation("stale", "worker.py", "no such text", "")
    with pytest.raises(ValueError, match="'stale': the text to replace is 0 times"):
        plant(stale, package)

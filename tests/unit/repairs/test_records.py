# SPDX-License-Identifier: Apache-2.0
"""The records of repairs, held against what is really there."""

import ast
from pathlib import Path

import pytest

from vllm.junctions import repairs
from vllm.junctions.config import REPAIR_NAMES

_ROOT = Path(__file__).parents[3]


def test_every_repair_has_a_switch():
    assert set(repairs.NAMES) == set(REPAIR_NAMES)
    folder = _ROOT / "vllm" / "junctions" / "repairs"
    for name in REPAIR_NAMES:
        assert (folder / f"{name}.py").is_file() or (folder / name).is_dir()


@pytest.mark.parametrize("repair", repairs.REPAIRS, ids=lambda one: one.name)
def test_the_test_that_shows_a_fault_is_there(repair):
    file, _, name = repair.shown_by.partition("::")
    tree = ast.parse((_ROOT / file).read_text())
    assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert repair.remove_when or repair.hooks
    for hook in repair.hooks:
        assert (_ROOT / hook.guarded_by).is_file(), hook.guarded_by


def test_every_hook_fits_and_comes_off_again():
    repairs.HOOKS.check()
    repairs.HOOKS.install()
    repairs.HOOKS.uninstall()
    assert repairs.HOOKS.installed == ()

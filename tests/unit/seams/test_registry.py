# SPDX-License-Identifier: Apache-2.0
"""The records against the vLLM that is really installed."""

import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest
from vllm.v1.request import Request

from vllm.junctions import UnsupportedRuntimeError
from vllm.junctions.core import CORE_HOOKS, HookSet

_ROOT = Path(__file__).parents[3]


def _value(target: str):
    module_name, _, path = target.partition(":")
    value = importlib.import_module(module_name)
    for name in path.split("."):
        value = inspect.getattr_static(value, name)
    return value


def _snapshot() -> dict[str, object]:
    found = {}
    for hook in CORE_HOOKS.hooks:
        try:
            found[hook.target] = _value(hook.target)
        except AttributeError:
            found[hook.target] = None
    return found


def test_every_record_is_complete():
    for hook in CORE_HOOKS.hooks:
        for field in dataclasses.fields(hook):
            if field.name not in ("parameters", "replace"):
                assert getattr(hook, field.name), (hook.target, field.name)
        assert (_ROOT / hook.guarded_by).is_file(), hook.guarded_by


def test_installing_replaces_exactly_the_recorded_targets():
    before = _snapshot()
    CORE_HOOKS.install()
    try:
        after = _snapshot()
        assert [t for t in before if after[t] is not before[t]] == list(before)
        assert CORE_HOOKS.installed == tuple(before)
        CORE_HOOKS.install()
        assert _snapshot() == after
    finally:
        CORE_HOOKS.uninstall()
    assert _snapshot() == before
    assert CORE_HOOKS.installed == ()


def test_replacements_of_methods_keep_name_and_signature():
    before = _snapshot()
    CORE_HOOKS.install()
    try:
        for hook in CORE_HOOKS.hooks:
            if hook.parameters is None:
                continue
            original, replacement = before[hook.target], _value(hook.target)
            assert replacement.__wrapped__ is original
            assert inspect.signature(replacement) == inspect.signature(original)
    finally:
        CORE_HOOKS.uninstall()


@pytest.mark.parametrize(
    "change",
    [
        {"target": "vllm.v1.core.kv_cache_manager:KVCacheManager.gone"},
        {"target": "vllm.v1.core.no_such_module:KVCacheManager.get_computed_blocks"},
        {"parameters": ("request", "something_else")},
    ],
)
def test_a_target_that_does_not_fit_means_nothing_is_applied(change):
    before = _snapshot()
    last = dataclasses.replace(CORE_HOOKS.hooks[-1], **change)
    hooks = HookSet((*CORE_HOOKS.hooks[:-1], last))
    with pytest.raises(UnsupportedRuntimeError, match="Nothing was applied") as error:
        hooks.install()
    assert last.target in str(error.value)
    assert _snapshot() == before
    assert hooks.installed == ()


def test_a_replacement_that_fails_takes_the_others_back():
    before = _snapshot()

    def broken(_original):
        raise RuntimeError("broken")

    last = dataclasses.replace(CORE_HOOKS.hooks[-1], replace=broken)
    with pytest.raises(RuntimeError, match="broken"):
        HookSet((*CORE_HOOKS.hooks[:-1], last)).install()
    assert _snapshot() == before


def test_uninstalled_hooks_leave_no_attribute_behind():
    CORE_HOOKS.install()
    CORE_HOOKS.uninstall()
    assert not hasattr(Request, "shared_prefix_boundaries")

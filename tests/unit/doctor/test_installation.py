# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import json

import pytest

from vllm.junctions.doctor import installation
from vllm.junctions.doctor.findings import (
    Finding,
    Level,
    exit_status,
    fail,
    ok,
    summary,
    warn,
)
from vllm.junctions.seams import compat


def _levels(findings) -> list[str]:
    return [finding.level.value for finding in findings]


def test_a_finding_is_one_line_with_what_to_do_at_its_end():
    finding = fail("store", "two\nlines", "do this")
    assert str(finding) == "FAIL  store: two lines -> do this"
    assert str(ok("store", "fine")).startswith("ok ")
    assert "->" not in str(ok("store", "fine"))


def test_only_failures_make_the_exit_status():
    assert exit_status([ok("a", "b"), warn("a", "b", "c")]) == 0
    assert exit_status([ok("a", "b"), fail("a", "b", "c")]) == 1


def test_the_summary_repeats_what_failed_and_nothing_else():
    assert summary([ok("a", "b"), warn("a", "c", "d")]) == "Nothing failed."
    said = summary([warn("a", "b", "c"), fail("d", "e", "f"), fail("g", "h", "i")])
    assert said.splitlines() == ["Mend this first (2 failed):", "  d: e", "  g: h"]


def test_this_environment_is_sound():
    checks = [
        *installation.check_versions(),
        *installation.check_hooks(),
        *installation.check_entry_point(),
    ]
    assert {finding.level for finding in checks} == {Level.OK}
    assert len(checks) == 4


def test_an_unsupported_vllm_fails(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.31.0")
    found = next(installation.check_versions())
    assert found.level is Level.FAIL
    assert "0.31.0" in found.text


def test_a_vllm_that_does_it_itself_is_said(monkeypatch):
    monkeypatch.setattr(compat, "has_native_core", lambda: True)
    monkeypatch.setattr(compat, "has_native_store", lambda: True)
    found = next(installation.check_versions())
    assert (found.level, found.mend) == (Level.WARN, "pip uninstall vllm-junctions")


def test_a_mooncake_that_does_not_import_fails(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mooncake.store", None)
    found = list(installation.check_versions())[1]
    assert (found.level, found.subject) == (Level.FAIL, "Mooncake")


def test_a_patched_vllm_fails(monkeypatch):
    seams = (compat.Seam(f"{compat.STORE_WORKER}:MooncakeStoreWorker.gone", ()),)
    monkeypatch.setattr(compat, "STORE_SEAMS", seams)
    (found,) = installation.check_hooks()
    assert found.level is Level.FAIL
    assert "MooncakeStoreWorker.gone" in found.text


def test_a_missing_entry_point_fails(monkeypatch):
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: importlib.metadata.EntryPoints(),
    )
    (found,) = installation.check_entry_point()
    assert found.level is Level.FAIL


@pytest.mark.parametrize(
    ("allowed", "level"), [("", "FAIL"), ("other", "FAIL"), ("other,junctions", "ok")]
)
def test_plugins_that_vllm_is_told_to_leave_out(monkeypatch, allowed, level):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert _levels(installation.check_entry_point()) == [level]


@pytest.mark.parametrize(("seed", "level"), [(None, "warn"), ("0", "ok")])
def test_the_hash_seed(monkeypatch, seed, level):
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert _levels(installation.check_hash_seed()) == [level]


def _check(**config) -> list[Finding]:
    config = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        **config,
    }
    return list(installation.check_transfer_config(json.dumps(config)))


@pytest.mark.parametrize(
    ("config", "levels", "text"),
    [
        ({}, ["ok"], "turns junctions on"),
        (
            {"kv_connector_extra_config": {"junctions": False}},
            ["FAIL"],
            "turns junctions off",
        ),
        (
            {"kv_connector_extra_config": {"junctions_depth": 2}},
            ["FAIL"],
            "Unknown key 'junctions_depth'",
        ),
        ({"kv_connector": "NixlConnector"}, ["FAIL"], "selects NixlConnector"),
        ({"kv_connector_module_path": "mine"}, ["FAIL"], "goes past the plug-in"),
        ({"kv_role": "kv_consumer"}, ["ok", "warn"], "saves nothing"),
        (
            {
                "kv_role": "kv_consumer",
                "kv_connector_extra_config": {"save_decode_cache": True},
            },
            ["ok"],
            "on",
        ),
        (
            {"kv_connector_extra_config": {"enable_lookup": False}},
            ["ok", "warn"],
            "never asks",
        ),
    ],
)
def test_a_transfer_config(config, levels, text):
    found = _check(**config)
    assert _levels(found) == levels
    assert text in found[-1].text


def test_a_child_of_multiconnector_is_looked_at():
    child = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_connector_extra_config": {"junctions": False},
    }
    found = _check(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": [child]},
    )
    assert [f.text for f in found] == ["turns junctions off"]


@pytest.mark.parametrize("text", ["{", "[]", '{"kv_connector": 1}'])
def test_a_transfer_config_that_is_none_fails(text):
    assert _levels(installation.check_transfer_config(text)) == ["FAIL"]

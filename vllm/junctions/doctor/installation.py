# SPDX-License-Identifier: Apache-2.0
"""Checks of what is installed and configured in this environment."""

import importlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from vllm.junctions.config import JunctionsConfig
from vllm.junctions.doctor.findings import Finding, fail, ok, warn
from vllm.junctions.errors import ConfigurationError, UnsupportedRuntimeError
from vllm.junctions.overlay.plugin import CONNECTOR_NAME
from vllm.junctions.seams import compat
from vllm.junctions.version import __version__

_GROUP = "vllm.general_plugins"
_ENTRY = "junctions"
_REINSTALL = "install vllm-junctions into the environment that runs vLLM"


def check_versions() -> Iterator[Finding]:
    """Check vLLM's, Mooncake's and our own version."""
    version = compat.vllm_version()
    if not compat.is_supported_version(version):
        yield fail(
            "versions",
            f"vLLM {version} is not supported by vllm-junctions {__version__}",
            f"install vLLM {compat.SUPPORTED_TEXT}, or a vllm-junctions for yours",
        )
    elif compat.has_native_core() and compat.has_native_store():
        yield warn(
            "versions",
            f"vLLM {version} keeps several junctions itself; vllm-junctions stands "
            "down",
            "pip uninstall vllm-junctions",
        )
    else:
        yield ok("versions", f"vllm-junctions {__version__} on vLLM {version}")
    yield _check_mooncake()


def _check_mooncake() -> Finding:
    found = [
        f"{dist.metadata['Name']} {dist.version}"
        for dist in importlib.metadata.distributions()
        if (dist.metadata["Name"] or "").startswith("mooncake-transfer-engine")
    ]
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return fail(
            "Mooncake",
            f"{', '.join(found) or 'nothing'} installed; mooncake.store does not "
            f"import ({error})",
            "pip install mooncake-transfer-engine (without a GPU: "
            "mooncake-transfer-engine-non-cuda), and the system libraries that the "
            "error names",
        )
    return ok("Mooncake", ", ".join(found) or "present")


def check_hooks() -> Iterator[Finding]:
    """Check that everything of vLLM that is wrapped has the expected signature."""
    try:
        hooks = importlib.import_module("vllm.junctions.core").CORE_HOOKS
        compat.check_seams(compat.STORE_SEAMS)
        hooks.check()
    except UnsupportedRuntimeError as error:
        yield fail("hooks", str(error), "run an unpatched vLLM of a supported version")
    except ImportError as error:
        yield fail("hooks", f"vLLM's Mooncake store does not import ({error})", "")
    else:
        seams = len(compat.STORE_SEAMS)
        yield ok("hooks", f"{len(hooks.hooks)} hooks and {seams} seams fit this vLLM")


def check_entry_point() -> Iterator[Finding]:
    """Check that vLLM will find and load the plug-in."""
    entries = importlib.metadata.entry_points(group=_GROUP)
    entry = next((e for e in entries if e.name == _ENTRY), None)
    allowed = os.environ.get("VLLM_PLUGINS")
    if entry is None:
        yield fail("plug-in", f"no entry point {_ENTRY!r} in {_GROUP}", _REINSTALL)
    elif allowed is not None and _ENTRY not in allowed.split(","):
        yield fail(
            "plug-in",
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading it",
            f"add {_ENTRY!r} to VLLM_PLUGINS, or unset it",
        )
    else:
        yield ok("plug-in", f"{entry.name} = {entry.value} in {_GROUP}")


def check_hash_seed() -> Iterator[Finding]:
    """Check that instances can agree on the root of the block hash chain."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        yield warn(
            "hash seed",
            "PYTHONHASHSEED is not set; instances share hits only if it is unset on "
            "all of them and the hash algorithm is sha256 or sha256_cbor",
            "set PYTHONHASHSEED=0 on every instance",
        )
    else:
        yield ok("hash seed", f"PYTHONHASHSEED={seed}; every instance needs the same")


class _TransferConfig(msgspec.Struct):
    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, Any] = {}


def check_transfer_config(text: str) -> Iterator[Finding]:
    """Check the JSON that a server gets as ``--kv-transfer-config``."""
    subject = "kv-transfer-config"
    try:
        config = msgspec.json.decode(text, type=_TransferConfig)
        children = config.kv_connector_extra_config.get("connectors", [])
        configs = [config, *msgspec.convert(children, list[_TransferConfig])]
    except msgspec.MsgspecError as error:
        yield fail(subject, f"cannot be read: {error}", "pass the JSON vLLM gets")
        return
    stores = [config for config in configs if config.kv_connector == CONNECTOR_NAME]
    if not stores:
        yield fail(
            subject,
            f"selects {config.kv_connector}; junctions belong to {CONNECTOR_NAME}",
            f'"kv_connector": "{CONNECTOR_NAME}"',
        )
    for store in stores:
        yield from _check_store_config(subject, store)


def _check_store_config(subject: str, config: _TransferConfig) -> Iterator[Finding]:
    extra: Mapping[str, Any] = config.kv_connector_extra_config
    try:
        is_on = JunctionsConfig.from_extra_config(extra).junctions
    except ConfigurationError as error:
        yield fail(subject, str(error), "correct or remove the key")
        return
    if not is_on:
        yield fail(
            subject,
            "turns junctions off",
            'set "junctions": true in kv_connector_extra_config, or remove the key',
        )
    elif config.kv_connector_module_path:
        yield fail(
            subject,
            f"kv_connector_module_path {config.kv_connector_module_path!r} goes past "
            "the plug-in",
            "remove the key",
        )
    else:
        yield ok(subject, "turns junctions on")
    if config.kv_role == "kv_consumer" and not extra.get("save_decode_cache"):
        yield warn(
            subject,
            "kv_role kv_consumer saves nothing",
            "kv_both, unless others save for this instance",
        )
    if not extra.get("enable_lookup", True):
        yield warn(
            subject,
            "enable_lookup is false: this instance never asks the store",
            "remove the key, unless this is wanted",
        )

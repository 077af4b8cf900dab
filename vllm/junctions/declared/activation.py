# SPDX-License-Identifier: Apache-2.0
"""Whether an engine's configuration wants marks read, and switching that on."""

import functools
import importlib
import logging
from collections.abc import Mapping
from typing import Any

from vllm.junctions.config import JunctionsConfig
from vllm.junctions.errors import JunctionsError
from vllm.junctions.version import __version__

logger = logging.getLogger(__name__)

CONNECTOR_NAME = "MooncakeStoreConnector"
_MULTI_NAME = "MultiConnector"


def reads_marks(kv_transfer_config: Any) -> bool:
    """Return whether our connector is selected with junctions on.

    Args:
        kv_transfer_config: The engine's ``KVTransferConfig``; None where it has none.
    """
    if kv_transfer_config is None or kv_transfer_config.kv_connector_module_path:
        return False
    return _selects(
        kv_transfer_config.kv_connector, kv_transfer_config.kv_connector_extra_config
    )


def _selects(name: str | None, extra_config: Mapping[str, Any]) -> bool:
    if name == _MULTI_NAME:
        return any(
            not child.get("kv_connector_module_path")
            and _selects(
                child.get("kv_connector"), child.get("kv_connector_extra_config") or {}
            )
            for child in extra_config.get("connectors", ())
        )
    if name != CONNECTOR_NAME:
        return False
    try:
        return JunctionsConfig.from_extra_config(extra_config).junctions
    except JunctionsError:
        # The connector says so itself, and the engine does not start.
        return False


@functools.cache
def switch_on() -> None:
    """Read marks in this process from now on, where the running vLLM allows it.

    Says in the log what came of it, once.
    """
    read = [what for what, module in _READERS.items() if _install(what, module)]
    if read:
        logger.info(
            "vllm-junctions %s: marks are read on %s.", __version__, " and ".join(read)
        )


_READERS = {
    "chat messages": "vllm.junctions.declared.hooks",
    "Anthropic messages": "vllm.junctions.declared.anthropic",
}


def _install(what: str, module: str) -> bool:
    try:
        importlib.import_module(module).HOOKS.install()
    except JunctionsError as error:
        logger.warning(
            "vllm-junctions %s: marks on %s are ignored: %s", __version__, what, error
        )
        return False
    return True

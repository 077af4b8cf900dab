# SPDX-License-Identifier: Apache-2.0
"""Entry point in ``vllm.general_plugins``: vLLM calls it in every process.

It imports nothing of the Mooncake store. What it changes is how the connector
factory answers for the one name ``MooncakeStoreConnector``, and that a configuration
which selects it lets the process read marks on chat messages.
"""

import functools
import importlib
import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

from vllm.junctions.config import JunctionsConfig
from vllm.junctions.declared import activation
from vllm.junctions.declared.activation import CONNECTOR_NAME
from vllm.junctions.seams import compat

logger = logging.getLogger(__name__)

_MARK = "from_vllm_junctions"


def register() -> None:
    """Make the factory's ``MooncakeStoreConnector`` entry load ours.

    Idempotent. Never raises: a fault here would stop engines that do not use the
    connector. On a vLLM that is not supported the entry stays in place until the
    connector is really selected, and then says so.

    Source: the seams are ``KVConnectorFactory``'s registry and its
    ``get_connector_class``, the one call that sees a connector's settings before
    any model is loaded, and ``VllmConfig.__post_init__``, which runs in each process
    that takes requests before anything is built that renders them.
    """
    try:
        if _is_unsupported():
            _warn_unsupported()
        factory = importlib.import_module(compat.FACTORY).KVConnectorFactory
        _register_entry(factory)
        _register_marks(importlib.import_module(compat.CONFIG).VllmConfig)
    except Exception:
        logger.exception(
            "vllm-junctions could not register with vLLM; nothing was applied."
        )


@functools.cache
def _warn_unsupported() -> None:
    # Children of an engine load plugins too; one warning is enough.
    if multiprocessing.parent_process() is None:
        logger.warning(
            "vllm-junctions does not support vLLM %s (supported: %s). Nothing is "
            "applied; selecting %s will fail until one of them is changed.",
            compat.vllm_version(),
            compat.SUPPORTED_TEXT,
            CONNECTOR_NAME,
        )


def _register_entry(factory: Any) -> None:
    registry = factory._registry
    stock_loader = registry[CONNECTOR_NAME]
    if getattr(stock_loader, _MARK, False):
        return
    original = factory.get_connector_class.__func__

    def load() -> type:
        if _stands_down():
            return stock_loader()
        compat.check_version()
        return importlib.import_module(
            "vllm.junctions.overlay.drop_in"
        ).MooncakeStoreConnector

    def get_connector_class(cls: Any, kv_transfer_config: Any) -> Any:
        if _selects_entry(kv_transfer_config):
            config = JunctionsConfig.from_extra_config(
                kv_transfer_config.kv_connector_extra_config
            )
            if not config.junctions:
                _say_off()
                return _stock(stock_loader, config.junctions_record is not None)
        return original(cls, kv_transfer_config)

    setattr(load, _MARK, True)
    registry[CONNECTOR_NAME] = load
    factory.get_connector_class = classmethod(get_connector_class)


def _stock(load: Callable[[], type], records: bool) -> type:
    if not records:
        return load()
    found: type = importlib.import_module("vllm.junctions.record.connector").recording(
        load()
    )
    return found


def _register_marks(config_cls: Any) -> None:
    original = config_cls.__post_init__
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if (
            activation.reads_marks(self.kv_transfer_config)
            and not _is_unsupported()
            and not _is_native()
        ):
            activation.switch_on()

    setattr(__post_init__, _MARK, True)
    config_cls.__post_init__ = __post_init__


def _is_unsupported() -> bool:
    return not compat.is_supported_version(compat.vllm_version())


def _selects_entry(kv_transfer_config: Any) -> bool:
    return (
        kv_transfer_config.kv_connector == CONNECTOR_NAME
        and not kv_transfer_config.kv_connector_module_path
    )


@functools.cache
def _say_off() -> None:
    logger.info(
        "vllm-junctions: junctions off by configuration; stock %s, no hooks.",
        CONNECTOR_NAME,
    )


def _is_native() -> bool:
    return compat.has_native_core() and compat.has_native_store()


def _stands_down() -> bool:
    if not _is_native():
        return False
    logger.warning(
        "vllm-junctions stands down: vLLM %s keeps several shared-prefix boundaries "
        "itself. You can uninstall vllm-junctions.",
        compat.vllm_version(),
    )
    return True

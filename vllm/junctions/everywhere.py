# SPDX-License-Identifier: Apache-2.0
"""What :func:`vllm.junctions.enable` does: every seam at once, for tests."""

import importlib

from vllm.junctions import compat, plugin
from vllm.junctions.hooks import CORE_HOOKS
from vllm.junctions.hooks.managers import ENABLED
from vllm.junctions.substitute import rebind


def apply() -> None:
    """Install the core hooks for all engines and rebind the store's class names.

    Raises:
        UnsupportedRuntimeError: The running vLLM is not supported; nothing was
            applied.
    """
    compat.check_version()
    compat.check_seams(compat.STORE_SEAMS)
    CORE_HOOKS.install()
    manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
    setattr(manager.KVCacheManager, ENABLED, True)
    _rebind_store_names()
    plugin.register()


def _rebind_store_names() -> None:
    from vllm.junctions.coordinator import JunctionStoreCoordinator
    from vllm.junctions.scheduler import JunctionStoreScheduler
    from vllm.junctions.worker import (
        JunctionLookupClient,
        JunctionLookupServer,
        JunctionSendingThread,
        JunctionStoreWorker,
    )

    for module_name in (
        compat.STORE_COORDINATOR,
        compat.STORE_WORKER,
        compat.STORE_SCHEDULER,
        compat.STORE_CONNECTOR,
    ):
        rebind(
            module_name,
            MooncakeStoreCoordinator=JunctionStoreCoordinator,
            MooncakeStoreScheduler=JunctionStoreScheduler,
            MooncakeStoreWorker=JunctionStoreWorker,
            KVCacheStoreSendingThread=JunctionSendingThread,
            LookupKeyClient=JunctionLookupClient,
            LookupKeyServer=JunctionLookupServer,
        )

# SPDX-License-Identifier: Apache-2.0
"""Every seam at once, whichever connector an engine selects.

For vLLM's own suites: the core hooks go on for every engine of the process, and the
Mooncake store modules name our classes.
"""

import importlib

from vllm.junctions.core import CORE_HOOKS
from vllm.junctions.core.managers import ENABLED
from vllm.junctions.overlay import plugin
from vllm.junctions.seams import compat
from vllm.junctions.seams.substitute import rebind


def enable() -> None:
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
    from vllm.junctions.store.coordinator import JunctionStoreCoordinator
    from vllm.junctions.store.scheduler import JunctionStoreScheduler
    from vllm.junctions.store.worker import (
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

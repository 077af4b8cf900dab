# SPDX-License-Identifier: Apache-2.0
"""Every seam at once, whichever connector an engine selects.

For vLLM's own suites: the core hooks go on for every engine of the process, and the
Mooncake store modules name our classes.
"""

from vllm.junctions import repairs
from vllm.junctions.core import CORE_HOOKS
from vllm.junctions.core.managers import JUNCTIONS
from vllm.junctions.overlay import plugin
from vllm.junctions.seams import compat
from vllm.junctions.seams.substitute import rebind
from vllm.junctions.seams.switches import switch_on

# Classes whose every object takes part.
_SWITCHED = (
    "vllm.v1.core.kv_cache_manager:KVCacheManager",
    f"{compat.STORE_SCHEDULER}:MooncakeStoreScheduler",
    f"{compat.STORE_WORKER}:LookupKeyClient",
)


def enable() -> None:
    """Install the core hooks for all engines and rebind the store's class names.

    Raises:
        UnsupportedRuntimeError: The running vLLM is not supported; nothing was
            applied.
    """
    compat.check_version()
    compat.check_seams(compat.STORE_SEAMS)
    CORE_HOOKS.install()
    repairs.HOOKS.install()
    for target in _SWITCHED:
        _, _, owner = compat.resolve(target)
        switch_on(owner, (JUNCTIONS, *repairs.NAMES))
    _rebind_store_names()
    plugin.register()


def _rebind_store_names() -> None:
    from vllm.junctions.lookup.client import JunctionLookupClient
    from vllm.junctions.store.coordinator import JunctionStoreCoordinator
    from vllm.junctions.store.scheduler import JunctionStoreScheduler
    from vllm.junctions.store.sender import JunctionSendingThread
    from vllm.junctions.store.server import JunctionLookupServer
    from vllm.junctions.store.worker import JunctionStoreWorker

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

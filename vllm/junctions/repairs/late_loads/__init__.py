# SPDX-License-Identifier: Apache-2.0
"""Loads over TCP that were given up write into no KV block.

What stock does: it hands the addresses of KV blocks to Mooncake. Mooncake's client
(0.3.13) waits 60 s for the transfers of a call, then reports those that are not over as
failed and leaves them queued. Once the peer answers again they are served, into blocks
that belong to another request by then.

What this does: values land in memory of their own, one run of bytes and so one transfer
a key, and a value that is complete is copied into its blocks while the load still owns
them. Memory of a call that may have been given up is never used again.

``REPAIR`` says where stock shows it, and when this can go.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.logger import init_logger

from vllm.junctions.repairs.late_loads.kv_memory import KVMemory
from vllm.junctions.repairs.late_loads.landing import LandingMemory, Unavailable
from vllm.junctions.repairs.late_loads.store import LandingStore
from vllm.junctions.repairs.record import Repair

logger = init_logger(__name__)

REPAIR = Repair(
    name="late_loads",
    fault=(
        "Over TCP, a load that Mooncake gives up is served when its peer answers "
        "again, into KV blocks that belong to another request by then."
    ),
    shown_by=(
        "tests/e2e/test_late_transfers.py::"
        "test_mooncake_writes_into_the_memory_of_reads_that_it_gave_up"
    ),
    versions=("0.32.0",),
    remove_when=(
        "Mooncake cancels what it gives up, or vLLM keeps the blocks until it is over."
    ),
)

# Takes the kind of a fault and what happened; the kinds are those of ``store.py``.
Report = Callable[[str, str], None]


def land_loads(
    worker: Any, protocol: str, kv_caches: Mapping[str, Any], report: Report
) -> bool:
    """Let a worker's load threads read by way of landing memory.

    To be called once the threads exist, and before the first load. Other protocols
    than TCP are left alone, and so is a worker without load threads. Where landing
    memory cannot be had, loads stay as they are and the log says so.

    Source: wraps the store of vLLM's ``KVCacheStoreRecvingThread``.

    Args:
        worker: A ``MooncakeStoreWorker`` whose KV caches are registered.
        protocol: Mooncake's, from its configuration.
        kv_caches: What ``register_kv_caches`` was given.
        report: Told of each call whose memory was set aside, and of each refused one.

    Returns:
        Whether loads land.
    """
    if protocol != "tcp" or not worker.kv_recv_threads:
        return False
    try:
        memory = LandingMemory.registered_with(worker.store)
    except Unavailable as error:
        logger.warning(
            "Loads read straight into KV blocks (%s): one that is given up may be "
            "served late, into blocks of another request.",
            error,
        )
        return False
    blocks = KVMemory.of(kv_caches)
    for thread in worker.kv_recv_threads:
        thread.store = LandingStore(thread.store, memory, blocks, report)
    return True

# SPDX-License-Identifier: Apache-2.0
"""What a repair says of itself."""

from dataclasses import dataclass

from vllm.junctions.seams.registry import Hook

STORE_SCHEDULER = (
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler:"
    "MooncakeStoreScheduler"
)
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


@dataclass(frozen=True)
class Repair:
    """One fault of stock vLLM, and what mends it.

    Attributes:
        name: What ``junctions_repairs`` calls it.
        fault: What stock does.
        shown_by: The test that shows it on stock, as pytest names it.
        versions: vLLM releases on which it was seen.
        hooks: What mends it. Each acts only where the switch of this name is on. None
            where the store of a worker's threads is wrapped instead.
        remove_when: What has to change before it can go, where no hook says so.
    """

    name: str
    fault: str
    shown_by: str
    versions: tuple[str, ...]
    hooks: tuple[Hook, ...] = ()
    remove_when: str = ""

# SPDX-License-Identifier: Apache-2.0
"""Store workers that can look up and nothing else: no engine, no threads, no GPU."""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    MooncakeStoreCoordinator,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    ChunkedTokenDatabase,
    KeyMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    MooncakeStoreWorker,
)

from testbed.box import Layout
from vllm.junctions.metrics.counted import JunctionCounters
from vllm.junctions.store.coordinator import JunctionStoreCoordinator
from vllm.junctions.store.worker import JunctionStoreWorker


class ExistenceStore(Protocol):
    """The one call that lookups make."""

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...


def build_coordinator(
    cls: type[MooncakeStoreCoordinator], layout: Layout, partial_hits: bool = False
) -> Any:
    return cls(
        layout.kv_cache_config(num_blocks=1).kv_cache_groups,
        layout.scheduler_block_tokens,
        layout.hash_tokens,
        use_eagle=layout.drops_eagle_block,
        retention_interval=layout.retention_interval,
        enable_partial_hash_hits=partial_hits,
    )


def build_worker(
    cls: type[MooncakeStoreWorker],
    layout: Layout,
    store: ExistenceStore,
    num_ranks: Sequence[int] | None = None,
    partial_hits: bool = False,
) -> Any:
    """Return a worker with what lookups read; ours looks up in one phase.

    Args:
        cls: The stock class or ours.
        layout: The groups.
        store: What it asks.
        num_ranks: Rank namespaces of each group; one if not given.
        partial_hits: Whether hits land on hash units.
    """
    ours = issubclass(cls, JunctionStoreWorker)
    worker = object.__new__(cls)
    worker.coord = build_coordinator(
        JunctionStoreCoordinator if ours else MooncakeStoreCoordinator,
        layout,
        partial_hits,
    )
    worker._capacity_only = False
    worker.store = store
    worker.hash_block_size = layout.hash_tokens
    worker._kv_cache_groups = worker.coord.kv_cache_groups
    worker.token_dbs = [
        ChunkedTokenDatabase(
            KeyMetadata("model", 0, 0, 0, 0, group_id=group_id),
            group.block_tokens,
            layout.hash_tokens,
        )
        for group_id, group in enumerate(layout.groups)
    ]
    worker._lookup_key_prefixes = tuple(
        database.store_layout.lookup_key_prefixes(
            [(rank, 0, 0, 0) for rank in range(ranks)]
        )
        for database, ranks in zip(
            worker.token_dbs, num_ranks or [1] * len(layout.groups), strict=True
        )
    )
    worker._kv_connector_stats_lock = threading.Lock()
    worker.kv_connector_stats = MooncakeStoreConnectorStats()
    if ours:
        worker.counters = JunctionCounters()
    return worker

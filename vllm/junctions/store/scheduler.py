# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: junctions go to the request before compute, and to its saves."""

import hashlib
import logging
from functools import cached_property

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeStoreConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import (
    MooncakeStoreScheduler,
)
from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm.junctions.config import JunctionsConfig
from vllm.junctions.core.request import (
    junctions_of,
    set_junctions,
    shared_prefix_boundaries,
)
from vllm.junctions.lookup.client import JunctionLookupClient
from vllm.junctions.lookup.wire import HitUnits
from vllm.junctions.metrics.counted import (
    DECLARED,
    FOUND,
    INFO,
    PREDICTED,
    JunctionCounters,
)
from vllm.junctions.metrics.exported import JunctionConnectorStats
from vllm.junctions.metrics.lookup_report import LookupOutcome
from vllm.junctions.seams.compat import STORE_SCHEDULER
from vllm.junctions.seams.outcomes import failed_loads
from vllm.junctions.seams.substitute import substituted
from vllm.junctions.store.coordinator import JunctionStoreCoordinator
from vllm.junctions.store.data import JunctionReqMeta, JunctionTracker
from vllm.junctions.store.first_siblings import ExtraTails, FirstSiblings
from vllm.junctions.version import __version__

logger = init_logger(__name__)


def hash_root() -> str:
    """Return a short digest of the root of this process's block hash chain.

    Instances with different roots never find each other's keys. The root comes from
    ``PYTHONHASHSEED`` and the hash algorithm; the digest does not give it away.
    """
    root: bytes = getattr(kv_cache_utils, "NONE_HASH", b"")
    return hashlib.sha256(root).hexdigest()[:8]


class JunctionStoreScheduler(MooncakeStoreScheduler):
    """The stock scheduler side, with junctions merged and carried to saves."""

    client: JunctionLookupClient
    # None on an instance that only lends memory (vLLM 0.33).
    _store_coord: JunctionStoreCoordinator | None  # type: ignore[assignment]
    _has_told_info = False
    _last_too_short: str | None = None
    # None without a coordinator, and before an engine binds its block pool.
    _first_siblings: FirstSiblings | None = None
    # Without a constructor, as in vLLM's own tests, there is none.
    _vllm_config: VllmConfig | None = None

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        with substituted(
            STORE_SCHEDULER,
            LookupKeyClient=JunctionLookupClient,
            MooncakeStoreCoordinator=JunctionStoreCoordinator,
        ):
            super().__init__(vllm_config, kv_cache_config)
        self._vllm_config = vllm_config
        self.client.hit_units = HitUnits(
            hash_block_size=self._hash_block_size,
            hit=self._hash_block_size
            if self.enable_partial_hash_hits
            else self._block_size,
            block_size=self._block_size,
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Bind the engine's block pool; from here on requests come.

        Source: extends ``MooncakeStoreScheduler.bind_gpu_block_pool``.
        """
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._store_coord is not None and self._vllm_config is not None:
            self._first_siblings = self._build_first_siblings(
                self._vllm_config, self._store_coord
            )

    def _build_first_siblings(
        self, vllm_config: VllmConfig, coord: JunctionStoreCoordinator
    ) -> FirstSiblings:
        limits = vllm_config.scheduler_config
        return FirstSiblings(
            coord,
            JunctionsConfig.of(vllm_config).junctions_predict,
            self.kv_role != "kv_consumer",
            limits.long_prefill_token_threshold
            or limits.max_num_scheduled_tokens
            or limits.max_num_batched_tokens,
        )

    @cached_property
    def counters(self) -> JunctionCounters:
        """This side's counters: the lookup client's, if it has any."""
        found = getattr(self.client, "counters", None)
        return JunctionCounters() if found is None else found

    @cached_property
    def _junction_tracker(self) -> JunctionTracker:
        return JunctionTracker()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Check for a store hit, and give the request the junctions it reports.

        A lookup that is still in flight merges on the step at which it is ready;
        one that failed, or was not made, merges nothing.

        Source: extends ``MooncakeStoreScheduler.get_num_new_matched_tokens``.
        """
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        # A client of another make answers lookups, but knows no junctions.
        take_junctions = getattr(self.client, "take_junctions", None)
        junctions = take_junctions and take_junctions(request.request_id)
        if junctions is not None:
            set_junctions(request, store=junctions)
        elif self.enable_lookup and self._is_too_short(request):
            self._count_too_short(request.request_id)
        if self._first_siblings is not None and matched[0] is not None:
            self._first_siblings.place(
                request,
                num_computed_tokens + matched[0],
                junctions is not None,
                self.counters,
            )
        if junctions is not None and logger.isEnabledFor(logging.DEBUG):
            found = junctions_of(request)
            logger.debug(
                "Request %s was looked up as %d tokens (last block %s): "
                "junctions at %s, declared %s, predicted %s",
                request.request_id,
                request.num_tokens,
                request.block_hashes[-1].hex()[:8] if request.block_hashes else "",
                junctions,
                found.declared,
                found.predicted,
            )
        return matched

    def _is_too_short(self, request: Request) -> bool:
        coord = self._store_coord
        return coord is not None and request.num_tokens < coord.align_unit

    def _count_too_short(self, req_id: str) -> None:
        # The head of the queue is asked about at every step until it fits.
        if req_id != self._last_too_short:
            self._last_too_short = req_id
            self.counters.add_lookup(LookupOutcome.TOO_SHORT)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Update state after block allocation, and note the request's junctions.

        The scheduler assigns a request's local junctions before this call for the
        last time, so the tuple is complete here.

        Source: extends ``MooncakeStoreScheduler.update_state_after_alloc``.
        """
        self._count_found(request)
        self._junction_tracker.add(
            request.request_id, shared_prefix_boundaries(request)
        )
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _count_found(self, request: Request) -> None:
        # Twice for a request that loads: positions known by then count once.
        known = self._junction_tracker.get(request.request_id)
        junctions = junctions_of(request)
        sources = {
            "local": junctions.local,
            "store": junctions.store,
            DECLARED: junctions.declared,
            PREDICTED: junctions.predicted,
        }
        for source, positions in sources.items():
            num_new = sum(position not in known for position in positions)
            if num_new:
                self.counters.add(FOUND, num_new, source)

    def get_kv_connector_stats(self) -> JunctionConnectorStats | None:
        """Return what this side has counted since the last call, if anything."""
        if not self._has_told_info:
            self._has_told_info = True
            self.counters.observe(
                INFO,
                1,
                __version__,
                str(self._block_size),
                str(self._hash_block_size),
                hash_root(),
            )
        return JunctionConnectorStats.of(None, self.counters)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        """Build the step's metadata; every save names its request's junctions.

        Source: extends ``MooncakeStoreScheduler.build_connector_meta``.
        """
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, MooncakeStoreConnectorMetadata)
        self._junction_tracker.discard(scheduler_output.finished_req_ids)
        if self._first_siblings is not None:
            self._first_siblings.discard(scheduler_output.finished_req_ids)
        meta.requests = [
            self._with_junctions(req_meta) if req_meta.can_save else req_meta
            for req_meta in meta.requests
        ]
        return meta

    def _with_junctions(self, req_meta: ReqMeta) -> JunctionReqMeta:
        extra = ExtraTails()
        if self._first_siblings is not None:
            extra = self._first_siblings.of(req_meta.req_id)
        return JunctionReqMeta.of(
            req_meta,
            self._junction_tracker.get(req_meta.req_id),
            extra.declared,
            extra.predicted,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Release blocks of saves that have ended, and count failed loads.

        Source: extends ``MooncakeStoreScheduler.update_connector_output``.
        """
        super().update_connector_output(connector_output)
        for req_id in failed_loads(self, connector_output):
            self.counters.add_fault(
                "failed_loads",
                f"A load from the store failed for request {req_id}; the worker's log "
                "names the keys.",
            )

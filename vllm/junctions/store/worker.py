# SPDX-License-Identifier: Apache-2.0
"""Worker side: lookups that report junctions, saves that keep their tails."""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
    worker as stock_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    MooncakeStoreWorker,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm.junctions.config import JunctionsConfig
from vllm.junctions.lookup import at_once
from vllm.junctions.lookup.explain import explain
from vllm.junctions.lookup.found import Found
from vllm.junctions.lookup.probe import StoreProbe
from vllm.junctions.lookup.two_phase import search
from vllm.junctions.lookup.two_phase.plan import LookupPlan, plan_lookups
from vllm.junctions.lookup.wire import JunctionLookupResult
from vllm.junctions.metrics.counted import JunctionCounters
from vllm.junctions.metrics.exported import JunctionConnectorStats
from vllm.junctions.metrics.lookup_report import LookupReport
from vllm.junctions.seams.compat import STORE_WORKER
from vllm.junctions.seams.substitute import substituted
from vllm.junctions.store.sender import JunctionSendingThread, SavingCoordinator
from vllm.junctions.store.server import JunctionLookupServer

logger = init_logger(__name__)


class JunctionStoreWorker(MooncakeStoreWorker):
    """The stock worker, with junctions in lookups and in saves."""

    coord: SavingCoordinator
    # How lookups ask the store in two phases; None: all at once, as stock does. Also
    # a worker whose constructor never ran looks up: in vLLM's own tests, whose stores
    # answer by a key's place in stock's one call.
    _lookup_plan: LookupPlan | None = None
    # What Mooncake transfers by; empty where no constructor has found out.
    protocol = ""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        with substituted(
            STORE_WORKER,
            MooncakeStoreCoordinator=SavingCoordinator,
            LookupKeyServer=JunctionLookupServer,
        ):
            super().__init__(vllm_config, kv_cache_config)
        # Where the stock constructor has just found it.
        self.protocol = stock_worker.MooncakeStoreConfig.load_from_config().protocol
        config = JunctionsConfig.of(vllm_config)
        if not self._capacity_only and config.junctions_lookup == "two_phase":
            self._plan_lookups()

    def _plan_lookups(self) -> None:
        self._lookup_plan = plan_lookups(self.coord, self._lookup_key_prefixes)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register KV caches; the sender that this starts knows junctions."""
        with substituted(STORE_WORKER, KVCacheStoreSendingThread=JunctionSendingThread):
            super().register_kv_caches(kv_caches)
        if isinstance(self.kv_send_thread, JunctionSendingThread):
            self.kv_send_thread.counters = self.counters

    @cached_property
    def counters(self) -> JunctionCounters:
        """What this rank has counted."""
        return JunctionCounters()

    def get_kv_connector_stats(self) -> JunctionConnectorStats | None:
        """Return what this rank has counted since the last call, if anything.

        Source: extends ``MooncakeStoreWorker.get_kv_connector_stats``.
        """
        return JunctionConnectorStats.of(
            super().get_kv_connector_stats(), self.counters
        )

    def lookup(
        self, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> MooncakeLookupResult:
        """Look up a request's prefix; return the joint hit and junctions.

        Runs on the one lookup thread of rank 0. Whatever goes wrong costs the hit
        only. The result's entries are stock's; a :class:`JunctionLookupResult` if
        there are junctions.

        Source: extends ``MooncakeStoreWorker.lookup``.

        Args:
            num_tokens: Tokens of the request.
            block_hashes: Its block hashes, one per hash unit.
        """
        if self._capacity_only:
            # It only lends memory.
            return super().lookup(num_tokens, block_hashes)
        probe = StoreProbe(self.store)
        try:
            found = self._look_up(probe, num_tokens, block_hashes)
            report = self._report(probe, num_tokens, found)
        except Exception as error:
            # An exception would end the lookup thread, and with it every request
            # that waits for an answer.
            found, report = None, self._failed(num_tokens, error)
        report = replace(report, num_keys=probe.num_keys, num_rpcs=probe.num_rpcs)
        self._observe(report, found, block_hashes)
        if found is None:
            return MooncakeLookupResult(0)
        hit = found.hit_length, found.tail_key_boundaries
        if not report.junctions:
            return MooncakeLookupResult(*hit)
        return JunctionLookupResult(*hit, report.junctions)

    def _look_up(
        self, probe: StoreProbe, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> Found | None:
        """Ask the store; None if nothing could be stored, or the store failed."""
        if self._lookup_plan is None:
            return at_once.look_up(self, probe, num_tokens, block_hashes)
        ask = functools.partial(self._ask, probe)
        try:
            return search.look_up(
                self._lookup_plan,
                num_tokens,
                block_hashes,
                ask,
                self._tail_key_boundaries,
            )
        except search.StoreCallError as error:
            logger.error("Remote connection failed in lookup: %s", error)
            return None

    def _ask(self, probe: StoreProbe, keys: list[str]) -> Sequence[int]:
        start = time.perf_counter()
        error: Exception | None = None
        try:
            return probe.batch_is_exist(keys)
        except Exception as raised:
            error = raised
            raise search.StoreCallError(repr(raised)) from raised
        finally:
            self._record_kv_connector_operation(
                "lookup_exists",
                time.perf_counter() - start,
                len(keys),
                status="ok" if error is None else "error",
                num_failed_keys=0 if error is None else len(keys),
            )

    def _report(
        self, probe: StoreProbe, num_tokens: int, found: Found | None
    ) -> LookupReport:
        if found is None:
            is_too_short = self.coord.align_lookup_length(num_tokens - 1) <= 0
            return LookupReport(
                num_tokens, is_too_short=is_too_short, error=probe.error
            )
        return LookupReport(
            num_tokens,
            found.hit_length,
            found.longest_hit_length,
            self.coord.junctions(found.hit_length, found.longest_hit_length),
            found.lagging_group,
            error=None if found.hit_length else probe.error,
        )

    def _failed(self, num_tokens: int, error: Exception) -> LookupReport:
        logger.debug("Store lookup failed", exc_info=True)
        self.counters.add_fault(
            "failed_lookups",
            f"A store lookup failed and counts as no hit: {error!r}.",
        )
        return LookupReport(num_tokens, error=repr(error))

    def _observe(
        self,
        report: LookupReport,
        found: Found | None,
        block_hashes: Sequence[BlockHash],
    ) -> None:
        try:
            self.observe_lookup(report)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", self._explained(report, found, block_hashes))
        except Exception:
            # The answer is right all the same.
            logger.exception("A store lookup could not be counted or explained")

    def observe_lookup(self, report: LookupReport) -> None:
        """Take note of a finished lookup. Runs on the lookup thread."""
        self.counters.add_report(report, self.coord.group_names)

    def _explained(
        self,
        report: LookupReport,
        found: Found | None,
        block_hashes: Sequence[BlockHash],
    ) -> str:
        """Explain a lookup; asks the store for whatever the lookup left out.

        For debug logs only: the answer may take a second, full existence check.
        """
        hits: dict[int, int] = {}
        if report.error is None and not report.is_too_short:
            if found is None or found.answers is None:
                probe = StoreProbe(self.store)
                found = at_once.look_up(self, probe, report.num_tokens, block_hashes)
            if found is not None and found.answers is not None:
                usable_tokens = self.coord.align_lookup_length(report.num_tokens - 1)
                hits = self.coord.hits_by_group(
                    block_hashes, usable_tokens, found.answers
                )
        last = block_hashes[len(block_hashes) - 1].hex()[:8] if block_hashes else ""
        return explain(report, self.coord, hits, last)

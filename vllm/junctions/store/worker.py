# SPDX-License-Identifier: Apache-2.0
"""Worker side: lookups that report junctions, saves that keep their tails."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
    worker as stock_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    ReqMeta,
    TailKeyBoundary,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreSendingThread,
    LookupKeyServer,
    MooncakeStoreWorker,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm.junctions.config import JunctionsConfig
from vllm.junctions.lookup.explain import explain
from vllm.junctions.lookup.probe import StoreProbe
from vllm.junctions.lookup.report import LookupReport
from vllm.junctions.lookup.two_phase.plan import LookupPlan, plan_lookups
from vllm.junctions.lookup.two_phase.search import Findings, StoreCallError, look_up
from vllm.junctions.lookup.wire import (
    JunctionLookupResult,
    add_junctions,
)
from vllm.junctions.metrics.counted import JunctionCounters
from vllm.junctions.metrics.exported import JunctionConnectorStats
from vllm.junctions.seams.compat import STORE_WORKER
from vllm.junctions.seams.substitute import substituted
from vllm.junctions.store.coordinator import JunctionStoreCoordinator
from vllm.junctions.store.job import JunctionJob

logger = init_logger(__name__)


class JunctionStoreWorker(MooncakeStoreWorker):
    """The stock worker, with junctions in lookups and in saves."""

    coord: JunctionStoreCoordinator
    # Set while a lookup is under way, on the thread that makes it.
    _probe: StoreProbe | None = None
    # The existence answers of the last lookup, if one call gave them all.
    _all_answers: ExternalCachedBlockPool | None = None
    # How lookups ask the store in two phases; None: all at once, as stock does. Also
    # a worker whose constructor never ran looks up: in vLLM's own tests, whose stores
    # answer by a key's place in stock's one call.
    _lookup_plan: LookupPlan | None = None
    # What Mooncake transfers by; empty where no constructor has found out.
    protocol = ""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        # Read by the lookup thread, which the stock constructor starts.
        self._answers: ExternalCachedBlockPool | None = None
        with substituted(
            STORE_WORKER,
            MooncakeStoreCoordinator=JunctionStoreCoordinator,
            LookupKeyServer=JunctionLookupServer,
        ):
            super().__init__(vllm_config, kv_cache_config)
        # Where the stock constructor has just found it.
        self.protocol = stock_worker.MooncakeStoreConfig.load_from_config().protocol
        assert vllm_config.kv_transfer_config is not None
        config = JunctionsConfig.from_extra_config(
            vllm_config.kv_transfer_config.kv_connector_extra_config
        )
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

    @property
    def store(self) -> Any:
        """The store; to a thread that looks something up, one that takes notes."""
        probe = self._probe
        if probe is not None and probe.thread_id == threading.get_ident():
            return probe
        return self._store

    @store.setter
    def store(self, store: Any) -> None:
        self._store = store

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
        """Look up a request's prefix; report the joint hit and junctions.

        Runs on the one lookup thread of rank 0. Whatever goes wrong costs the hit
        only. Two-phase where the layout allows it, see :mod:`.two_phase`; otherwise
        junctions come from the answers that the stock lookup got.

        The result's entries are stock's; a :class:`JunctionLookupResult` if there
        are junctions.

        Source: extends ``MooncakeStoreWorker.lookup``.

        Args:
            num_tokens: Tokens of the request.
            block_hashes: Its block hashes, one per hash unit.
        """
        self._all_answers = None
        self._probe = probe = StoreProbe(self.store)
        try:
            report, result = self._look_up(num_tokens, block_hashes)
        except Exception as error:
            # An exception would end the lookup thread, and with it every request
            # that waits for an answer.
            logger.debug("Store lookup failed", exc_info=True)
            self.counters.add_fault(
                "failed_lookups",
                f"A store lookup failed and counts as no hit: {error!r}.",
            )
            report = LookupReport(num_tokens, error=repr(error))
            result = MooncakeLookupResult(0)
        finally:
            self._probe = None
        try:
            report = self._completed(report, probe, block_hashes)
            self.observe_lookup(report)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", self._explained(report, block_hashes))
        except Exception:
            # The answer is right all the same.
            logger.exception("A store lookup could not be counted or explained")
        return result

    def observe_lookup(self, report: LookupReport) -> None:
        """Take note of a finished lookup. Runs on the lookup thread."""
        names = {} if self._capacity_only else self.coord.group_names
        self.counters.add_report(report, names)

    def _completed(
        self,
        report: LookupReport,
        probe: StoreProbe,
        block_hashes: Sequence[BlockHash],
    ) -> LookupReport:
        """Return ``report`` with what the lookup itself left open."""
        known: dict[str, Any] = {}
        if not report.num_rpcs:
            known.update(num_keys=probe.num_keys, num_rpcs=probe.num_rpcs)
        if report.error is None and not report.hit_length:
            known.update(error=probe.error)
        if report.lost_tokens and report.lagging_group is None and self._all_answers:
            hits = self._hits_by_group(report, block_hashes, self._all_answers)
            lagging = min(hits, key=hits.__getitem__)
            if hits[lagging] < report.longest_hit_length:
                known.update(lagging_group=lagging)
        return replace(report, **known) if known else report

    def _hits_by_group(
        self,
        report: LookupReport,
        block_hashes: Sequence[BlockHash],
        answers: ExternalCachedBlockPool,
    ) -> dict[int, int]:
        usable_tokens = self.coord.align_lookup_length(report.num_tokens - 1)
        return self.coord.hits_by_group(block_hashes, usable_tokens, answers)

    def _explained(
        self, report: LookupReport, block_hashes: Sequence[BlockHash]
    ) -> str:
        """Explain a lookup; asks the store for whatever the lookup left out.

        For debug logs only: the answer may take a second, full existence check.
        """
        if self._capacity_only:
            return "Lookup on an instance that only lends memory: nothing to find."
        hits: dict[int, int] = {}
        if report.error is None and not report.is_too_short:
            if self._all_answers is None:
                super().lookup(report.num_tokens, block_hashes)
                self._answers = None
            if self._all_answers is not None:
                hits = self._hits_by_group(report, block_hashes, self._all_answers)
        last = block_hashes[len(block_hashes) - 1].hex()[:8] if block_hashes else ""
        return explain(report, self.coord, hits, last)

    def _look_up(
        self, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> tuple[LookupReport, MooncakeLookupResult]:
        if self._lookup_plan is None:
            result, found = self._look_up_at_once(num_tokens, block_hashes)
        else:
            result, found = self._look_up_in_two_phases(
                self._lookup_plan, num_tokens, block_hashes
            )
        if found is None:
            usable_tokens = self.coord.align_lookup_length(num_tokens - 1)
            return LookupReport(num_tokens, is_too_short=usable_tokens <= 0), result
        junctions = self.coord.junctions(result.hit_length, found.longest_hit_length)
        report = LookupReport(
            num_tokens,
            result.hit_length,
            found.longest_hit_length,
            junctions,
            found.lagging_group,
        )
        if not junctions:
            return report, result
        return report, JunctionLookupResult(
            result.hit_length, result.tail_key_boundaries, junctions
        )

    def _look_up_at_once(
        self, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> tuple[MooncakeLookupResult, Findings | None]:
        self._answers = None
        result = super().lookup(num_tokens, block_hashes)
        answers, self._answers = self._answers, None
        if answers is None:
            return result, None
        longest = self.coord.longest_group_hit(
            block_hashes, self.coord.align_lookup_length(num_tokens - 1), answers
        )
        return result, Findings(result.hit_length, longest, None, answers)

    def _look_up_in_two_phases(
        self, plan: LookupPlan, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> tuple[MooncakeLookupResult, Findings | None]:
        try:
            found = look_up(plan, num_tokens, block_hashes, self._ask_store)
        except StoreCallError as error:
            logger.error("Remote connection failed in lookup: %s", error)
            return MooncakeLookupResult(0), None
        if found is None:
            return MooncakeLookupResult(0), None
        # In the pool of a two-phase lookup, hash units stand for hashes.
        units = cast(Sequence[BlockHash], range(len(block_hashes)))
        tails = super()._tail_key_boundaries(units, found.hit_length, found.pool)
        return MooncakeLookupResult(found.hit_length, tails), found

    def _ask_store(self, keys: list[str]) -> Sequence[int]:
        start = time.perf_counter()
        error: Exception | None = None
        try:
            return self.store.batch_is_exist(keys)
        except Exception as raised:
            error = raised
            raise StoreCallError(repr(raised)) from raised
        finally:
            self._record_kv_connector_operation(
                "lookup_exists",
                time.perf_counter() - start,
                len(keys),
                status="ok" if error is None else "error",
                num_failed_keys=0 if error is None else len(keys),
            )

    def _tail_key_boundaries(
        self,
        block_hashes: Sequence[BlockHash],
        hit_length: int,
        cached_block_pool: ExternalCachedBlockPool,
    ) -> tuple[TailKeyBoundary, ...]:
        # The last thing the stock lookup does with its answers: keep them for
        # ``lookup``, which runs on the same thread.
        self._answers = self._all_answers = cached_block_pool
        return super()._tail_key_boundaries(block_hashes, hit_length, cached_block_pool)


class JunctionSendingThread(KVCacheStoreSendingThread):
    """The stock sender, whose store masks include the job's junction tails."""

    coord: JunctionStoreCoordinator

    def __init__(
        self, store: Any, coord: JunctionStoreCoordinator, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(store, coord, *args, **kwargs)
        # The worker hands its own in; a thread by itself counts for nobody.
        self.counters = JunctionCounters()
        self._job: JunctionJob | None = None

    def _handle_request(self, req_meta: ReqMeta) -> None:
        boundaries = getattr(req_meta, "shared_prefix_boundaries", ())
        if not boundaries:
            super()._handle_request(req_meta)
            return
        # Only this thread uses ``coord`` and ``store``, one job at a time.
        layout, store = self.coord, self.store
        self._job = job = JunctionJob(self, req_meta, boundaries, self.counters)
        self.coord, self.store = cast(JunctionStoreCoordinator, job.coord), job.store
        try:
            super()._handle_request(req_meta)
        finally:
            self.coord, self.store, self._job = layout, store, None

    def _boundary_puts(self, req_meta: ReqMeta) -> list[Any]:
        if self._job is not None:
            for source, states in self._job.states_at_junctions():
                for key, *_ in super()._boundary_puts(states):
                    self._job.expect_state(source, key)
        return super()._boundary_puts(req_meta)

    def _record_saved(self, req_meta: ReqMeta, token_len: int) -> None:
        super()._record_saved(req_meta, token_len)
        if self._job is not None:
            self._job.saved()


class JunctionLookupServer(LookupKeyServer):
    """The stock lookup server, whose answers carry junctions as sentinel entries."""

    def __init__(
        self, store_worker: MooncakeStoreWorker, vllm_config: VllmConfig
    ) -> None:
        super().__init__(
            cast(MooncakeStoreWorker, _AnsweringWorker(store_worker)), vllm_config
        )


class _AnsweringWorker:
    """A worker as its lookup server sees it: lookups answer in wire entries."""

    def __init__(self, worker: MooncakeStoreWorker) -> None:
        self._worker = worker

    def lookup(
        self, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> MooncakeLookupResult:
        result = self._worker.lookup(num_tokens, block_hashes)
        return add_junctions(result, getattr(result, "junctions", ()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

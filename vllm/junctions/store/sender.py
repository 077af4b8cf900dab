# SPDX-License-Identifier: Apache-2.0
"""The thread that saves: its store masks include the tails at a job's junctions."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreSendingThread,
)

from vllm.junctions.metrics.counted import (
    EXTRA_BYTES,
    EXTRA_SOURCES,
    TAIL_BLOCKS,
    TAIL_BYTES,
    TAILS_SKIPPED,
    JunctionCounters,
)
from vllm.junctions.store.coordinator import GroupMasks, JunctionStoreCoordinator
from vllm.junctions.store.job import SaveJob, TailBlock


class SavingCoordinator(JunctionStoreCoordinator):
    """A worker's coordinator, of which its sending thread alone asks store masks.

    Attributes:
        job: The job under way, named by the thread before it begins; vLLM's thread
            asks for masks by lengths alone, in the middle of one long method.
    """

    job: SaveJob | None = None

    def store_mask(
        self,
        aligned_token_len: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        boundaries: Sequence[int] = (),
    ) -> GroupMasks:
        """Per-group store masks, with the tails at the job's junctions.

        Source: extends :meth:`JunctionStoreCoordinator.store_mask`.
        """
        lengths = (aligned_token_len, start_token)
        masks = super().store_mask(*lengths, num_prompt_tokens, boundaries)
        job = self.job
        if job is None:
            return masks
        for source, positions in job.boundaries_by_source():
            others, masks = masks, self.with_tails(masks, *lengths, positions)
            job.note_tails(source, masks, others, *lengths)
        return masks


class ReportingStore:
    """A store that tells what became of each put.

    Args:
        store: The store.
        on_put: Told the keys, the sizes of their buffers and Mooncake's answers.
    """

    def __init__(self, store: Any, on_put: Callable[..., None]) -> None:
        self._store = store
        self._on_put = on_put

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        *args: Any,
    ) -> Sequence[int]:
        """Write values from buffers; return 0 or an error code below 0 a key.

        Source: as Mooncake's ``batch_put_from_multi_buffers``.
        """
        res: Sequence[int] = self._store.batch_put_from_multi_buffers(
            keys, addrs, sizes, *args
        )
        self._on_put(keys, sizes, res)
        return res

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class JunctionSendingThread(KVCacheStoreSendingThread):
    """The stock sender, which also puts the tails at its jobs' junctions."""

    coord: SavingCoordinator

    def __init__(
        self, store: Any, coord: SavingCoordinator, *args: Any, **kwargs: Any
    ) -> None:
        reporting = ReportingStore(store, self._count_put)
        super().__init__(reporting, coord, *args, **kwargs)
        # The worker hands its own in; a thread by itself counts for nobody.
        self.counters = JunctionCounters()
        self._job: SaveJob | None = None

    def _handle_request(self, req_meta: ReqMeta) -> None:
        # One thread, one job at a time.
        self._job = self.coord.job = SaveJob(req_meta, self)
        super()._handle_request(req_meta)

    def _boundary_puts(self, req_meta: ReqMeta) -> list[Any]:
        job = self._job
        if job is not None and job.boundaries:
            for source, positions in job.boundaries_by_source():
                states = super()._boundary_puts(job.states_at(positions, self.coord))
                job.tails.update((key, TailBlock(source, key)) for key, *_ in states)
        return super()._boundary_puts(req_meta)

    def _record_saved(self, req_meta: ReqMeta, token_len: int) -> None:
        super()._record_saved(req_meta, token_len)
        job = self._job
        if job is not None and job.num_gone:
            # The job is done: what could not be saved is not tried again.
            self.counters.add(TAILS_SKIPPED, job.num_gone)
            job.num_gone = 0

    def _count_put(
        self, keys: Sequence[str], sizes: Sequence[Sequence[int]], res: Sequence[int]
    ) -> None:
        if self._job is None or not self._job.tails:
            return
        for source, num_blocks, num_bytes in self._job.tails_put(keys, sizes, res):
            self.counters.add(TAIL_BLOCKS, num_blocks)
            self.counters.add(TAIL_BYTES, num_bytes)
            if source in EXTRA_SOURCES:
                self.counters.add(EXTRA_BYTES, num_bytes, source)

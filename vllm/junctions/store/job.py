# SPDX-License-Identifier: Apache-2.0
"""One store job as the sender runs it: its masks, and what junctions made it put."""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.core.kv_cache_coordinator import replay_boundaries

from vllm.junctions.metrics.counted import (
    TAIL_BLOCKS,
    TAIL_BYTES,
    TAILS_SKIPPED,
    JunctionCounters,
)
from vllm.junctions.store.coordinator import GroupMasks, JunctionStoreCoordinator

if TYPE_CHECKING:
    from vllm.junctions.store.worker import JunctionSendingThread

# Group and number of tokens before the block: one block of a tail.
_Block = tuple[int, int]


class JunctionJob:
    """A store job of a request that has junctions.

    Stands in for the sender's coordinator and store while the stock code handles
    the job: store masks include the tails at the junctions, and a put is compared
    with the keys of those tails.
    """

    def __init__(
        self,
        sender: "JunctionSendingThread",
        req_meta: ReqMeta,
        boundaries: Sequence[int],
        counters: JunctionCounters,
    ) -> None:
        self._sender = sender
        self._req_meta = req_meta
        self._boundaries = boundaries
        self._counters = counters
        self._blocks_by_key: dict[str, _Block] = {}
        self._num_gone = 0
        self.coord = _JobCoordinator(sender.coord, self._store_mask)
        self.store = _JobStore(sender.store, self._after_put)

    def _store_mask(
        self,
        aligned_token_len: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
    ) -> GroupMasks:
        layout = self.coord.layout
        stock = layout.store_mask(aligned_token_len, start_token, num_prompt_tokens)
        masks = layout.with_junction_tails(
            stock, aligned_token_len, start_token, self._boundaries
        )
        for group_id, (mask, before) in enumerate(zip(masks, stock, strict=True)):
            if mask == before or mask is None or before is None:
                continue
            tail = [keep and not kept for keep, kept in zip(mask, before, strict=True)]
            self._expect_tail(group_id, tail, aligned_token_len, start_token)
        return masks

    def _expect_tail(
        self, group_id: int, tail: list[bool], token_len: int, start_token: int
    ) -> None:
        sender, meta = self._sender, self._req_meta
        if not sender.group_participates[group_id]:
            return
        database = sender.token_databases[group_id]
        put_step = sender.group_put_steps[group_id]
        block_ids = meta.block_ids[group_id]
        for start, _, block_hash in database.process_tokens(
            token_len,
            meta.block_hashes,
            mask_num=start_token,
            chunk_mask=tail,
            put_step=put_step,
            put_step_rank=(sender.tp_rank + group_id) % put_step,
        ):
            index = start // database.block_size
            if index >= len(block_ids) or block_ids[index] == NULL_BLOCK_ID:
                self._num_gone += 1
                continue
            layout = database.store_layout
            for shard_id in layout.local_shard_ids:
                key = layout.key_for(shard_id, block_hash)
                self._blocks_by_key[key] = (group_id, start)

    def states_at_junctions(self) -> ReqMeta:
        """Return the job with no boundary puts but Mamba states at junctions.

        A state that lies on a replay boundary of the request's own is stock's.
        """
        meta, layout = self._req_meta, self.coord.layout
        own: tuple[int, ...] = ()
        if meta.prefill_end_tokens is not None:
            own = replay_boundaries(
                meta.prefill_end_tokens,
                layout.lcm_block_size,
                use_eagle=bool(layout.eagle_group_ids),
            )
        states = copy.copy(meta)
        states.boundary_puts = [
            put
            for put in meta.boundary_puts or []
            if put.num_tokens in self._boundaries
            and put.num_tokens not in own
            and put.group_id in layout.mamba_group_ids
        ]
        return states

    def expect_state(self, key: str) -> None:
        """Count ``key`` as a junction's if the job puts it."""
        self._blocks_by_key[key] = (-1, len(self._blocks_by_key))

    def saved(self) -> None:
        """The job is done: what could not be saved is not tried again."""
        if self._num_gone:
            self._counters.add(TAILS_SKIPPED, self._num_gone)
            self._num_gone = 0

    def _after_put(
        self, keys: Sequence[str], sizes: Sequence[Sequence[int]], res: Sequence[int]
    ) -> None:
        if not self._blocks_by_key:
            return
        blocks: set[_Block] = set()
        num_bytes = 0
        for key, size, status in zip(keys, sizes, res, strict=False):
            block = self._blocks_by_key.get(key)
            if block is not None and status >= 0:
                blocks.add(block)
                num_bytes += sum(size)
        if blocks:
            self._counters.add(TAIL_BLOCKS, len(blocks))
            self._counters.add(TAIL_BYTES, num_bytes)


class _JobCoordinator:
    """A coordinator as one store job sees it: masks include its junctions."""

    def __init__(
        self, layout: JunctionStoreCoordinator, store_mask: Callable[..., GroupMasks]
    ) -> None:
        self.layout = layout
        self.store_mask = store_mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layout, name)


class _JobStore:
    """A store as one store job sees it: puts are looked at when they are done."""

    def __init__(self, store: Any, after_put: Callable[..., None]) -> None:
        self._store = store
        self._after_put = after_put

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        *args: Any,
    ) -> Sequence[int]:
        res: Sequence[int] = self._store.batch_put_from_multi_buffers(
            keys, addrs, sizes, *args
        )
        self._after_put(keys, sizes, res)
        return res

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

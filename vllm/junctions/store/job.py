# SPDX-License-Identifier: Apache-2.0
"""One store job as the sender runs it: its masks, and what junctions made it put."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.core.kv_cache_coordinator import replay_boundaries

from vllm.junctions.metrics.counted import (
    DECLARED,
    EXTRA_BYTES,
    EXTRA_SOURCES,
    PREDICTED,
    TAIL_BLOCKS,
    TAIL_BYTES,
    TAILS_SKIPPED,
    JunctionCounters,
)
from vllm.junctions.store.coordinator import GroupMasks, JunctionStoreCoordinator

if TYPE_CHECKING:
    from vllm.junctions.store.worker import JunctionSendingThread

# What named its junction, group and number of tokens before the block: one of a tail.
_Block = tuple[str, int, int]


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
        declared = getattr(req_meta, DECLARED, ())
        predicted = getattr(req_meta, PREDICTED, ())
        # A tail of several counts for the first of them.
        self._positions_by_source = {
            "found": [p for p in boundaries if p not in (*declared, *predicted)],
            DECLARED: declared,
            PREDICTED: predicted,
        }
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
        masks = stock
        for source, positions in self._positions_by_source.items():
            before, masks = (
                masks,
                layout.with_junction_tails(
                    masks, aligned_token_len, start_token, positions
                ),
            )
            for group_id, tail in _added(before, masks):
                self._expect_tail(
                    source, group_id, tail, aligned_token_len, start_token
                )
        return masks

    def _expect_tail(
        self,
        source: str,
        group_id: int,
        tail: list[bool],
        token_len: int,
        start_token: int,
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
                self._blocks_by_key[key] = (source, group_id, start)

    def states_at_junctions(self) -> Iterator[tuple[str, ReqMeta]]:
        """Yield the job with no boundary puts but Mamba states, source by source.

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
        for source, positions in self._positions_by_source.items():
            states = copy.copy(meta)
            states.boundary_puts = [
                put
                for put in meta.boundary_puts or []
                if put.num_tokens in positions
                and put.num_tokens not in own
                and put.group_id in layout.mamba_group_ids
            ]
            yield source, states

    def expect_state(self, source: str, key: str) -> None:
        """Count ``key`` as a junction's if the job puts it."""
        self._blocks_by_key[key] = (source, -1, len(self._blocks_by_key))

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
        num_bytes: Counter[str] = Counter()
        for key, size, status in zip(keys, sizes, res, strict=False):
            block = self._blocks_by_key.get(key)
            if block is not None and status >= 0:
                blocks.add(block)
                num_bytes[block[0]] += sum(size)
        if blocks:
            self._counters.add(TAIL_BLOCKS, len(blocks))
            self._counters.add(TAIL_BYTES, num_bytes.total())
        for source in EXTRA_SOURCES & num_bytes.keys():
            self._counters.add(EXTRA_BYTES, num_bytes[source], source)


def _added(before: GroupMasks, after: GroupMasks) -> Iterator[tuple[int, list[bool]]]:
    """Yield group id and mask of what a mask has more than the one before."""
    for group_id, (kept, mask) in enumerate(zip(before, after, strict=True)):
        if mask != kept and mask is not None and kept is not None:
            yield (
                group_id,
                [new and not old for new, old in zip(mask, kept, strict=True)],
            )


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

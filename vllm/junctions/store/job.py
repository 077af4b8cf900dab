# SPDX-License-Identifier: Apache-2.0
"""One store job, and what it puts only because its request has junctions."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreSendingThread,
)
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.core.kv_cache_coordinator import replay_boundaries

from vllm.junctions.store.coordinator import GroupMasks, JunctionStoreCoordinator


@dataclass
class SaveJob:
    """A store job of one rank, seen from its junctions.

    Attributes:
        req_meta: The job as the scheduler made it.
        sender: The thread that runs it.
        tails: Keys that only junctions ask for; of the shards of one block each
            names the first.
        num_gone: Blocks of tails that were freed before the job could save them.
    """

    req_meta: ReqMeta
    sender: KVCacheStoreSendingThread
    tails: dict[str, str] = field(default_factory=dict)
    num_gone: int = 0

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Token positions of the request's junctions, ascending."""
        return getattr(self.req_meta, "shared_prefix_boundaries", ())

    def note_tails(
        self, masks: GroupMasks, stock: GroupMasks, token_len: int, start_token: int
    ) -> None:
        """Take note of the blocks that ``masks`` keep and stock's do not.

        Args:
            masks: Store masks with the tails at junctions.
            stock: Those without, for the same range.
            token_len: Tokens that both reach to.
            start_token: Tokens before their first chunk.
        """
        for group_id, (mask, before) in enumerate(zip(masks, stock, strict=True)):
            if mask == before or mask is None or before is None:
                continue
            tail = [keep and not kept for keep, kept in zip(mask, before, strict=True)]
            if self.sender.group_participates[group_id]:
                self._note_tail(group_id, tail, token_len, start_token)

    def _note_tail(
        self, group_id: int, tail: list[bool], token_len: int, start_token: int
    ) -> None:
        sender, meta = self.sender, self.req_meta
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
                self.num_gone += 1
                continue
            layout = database.store_layout
            keys = [
                layout.key_for(shard_id, block_hash)
                for shard_id in layout.local_shard_ids
            ]
            self.tails.update(dict.fromkeys(keys, keys[0]))

    def states_at_junctions(self, coord: JunctionStoreCoordinator) -> ReqMeta:
        """Return the job with no boundary puts but Mamba states at junctions.

        A state that lies on a replay boundary of the request's own is stock's.
        """
        meta = self.req_meta
        own: tuple[int, ...] = ()
        if meta.prefill_end_tokens is not None:
            own = replay_boundaries(
                meta.prefill_end_tokens,
                coord.lcm_block_size,
                use_eagle=bool(coord.eagle_group_ids),
            )
        states = copy.copy(meta)
        states.boundary_puts = [
            put
            for put in meta.boundary_puts or []
            if put.num_tokens in self.boundaries
            and put.num_tokens not in own
            and put.group_id in coord.mamba_group_ids
        ]
        return states

    def tails_put(
        self, keys: Sequence[str], sizes: Sequence[Sequence[int]], res: Sequence[int]
    ) -> tuple[int, int]:
        """Return how many blocks and bytes a put wrote for junctions alone.

        Args:
            keys: What was put.
            sizes: Bytes of each buffer, by key.
            res: Mooncake's answer by key; below 0 for a failure.
        """
        blocks: set[str] = set()
        num_bytes = 0
        for key, size, status in zip(keys, sizes, res, strict=False):
            block = self.tails.get(key)
            if block is not None and status >= 0:
                blocks.add(block)
                num_bytes += sum(size)
        return len(blocks), num_bytes

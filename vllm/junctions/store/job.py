# SPDX-License-Identifier: Apache-2.0
"""One store job, and what it puts only because its request has junctions."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreSendingThread,
)
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.core.kv_cache_coordinator import replay_boundaries

from vllm.junctions.metrics.counted import DECLARED, PREDICTED
from vllm.junctions.store.coordinator import GroupMasks, JunctionStoreCoordinator

FOUND = "found"


class TailBlock(NamedTuple):
    """A block that only a junction asks for.

    Attributes:
        source: What named the junction: a lookup (``found``), ``declared``,
            ``predicted``.
        first_key: The key of its first shard.
    """

    source: str
    first_key: str


class TailsPut(NamedTuple):
    """What one put wrote for junctions of one source alone."""

    source: str
    num_blocks: int
    num_bytes: int


@dataclass
class SaveJob:
    """A store job of one rank, seen from its junctions.

    Attributes:
        req_meta: The job as the scheduler made it.
        sender: The thread that runs it.
        tails: Blocks that only junctions ask for, by the keys of their shards.
        num_gone: Blocks of tails that were freed before the job could save them.
    """

    req_meta: ReqMeta
    sender: KVCacheStoreSendingThread
    tails: dict[str, TailBlock] = field(default_factory=dict)
    num_gone: int = 0

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Token positions of the request's junctions, ascending."""
        return getattr(self.req_meta, "shared_prefix_boundaries", ())

    def boundaries_by_source(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield what named junctions, and where they are; each junction once.

        What a lookup found comes first, then what was declared.
        """
        declared = getattr(self.req_meta, DECLARED, ())
        predicted = getattr(self.req_meta, PREDICTED, ())
        extra = {*declared, *predicted}
        yield FOUND, tuple(p for p in self.boundaries if p not in extra)
        yield DECLARED, declared
        yield PREDICTED, predicted

    def note_tails(
        self,
        source: str,
        masks: GroupMasks,
        others: GroupMasks,
        token_len: int,
        start_token: int,
    ) -> None:
        """Take note of the blocks that ``masks`` keep and ``others`` do not.

        Args:
            source: What named the junctions that make the difference.
            masks: Store masks with the tails at those.
            others: Those without, for the same range.
            token_len: Tokens that both reach to.
            start_token: Tokens before their first chunk.
        """
        for group_id, (mask, before) in enumerate(zip(masks, others, strict=True)):
            if mask == before or mask is None or before is None:
                continue
            tail = [keep and not kept for keep, kept in zip(mask, before, strict=True)]
            if self.sender.group_participates[group_id]:
                self._note_tail(source, group_id, tail, token_len, start_token)

    def _note_tail(
        self,
        source: str,
        group_id: int,
        tail: list[bool],
        token_len: int,
        start_token: int,
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
            self.tails.update(dict.fromkeys(keys, TailBlock(source, keys[0])))

    def states_at(
        self, positions: Sequence[int], coord: JunctionStoreCoordinator
    ) -> ReqMeta:
        """Return the job with no boundary puts but Mamba states at some junctions.

        A state that lies on a replay boundary of the request's own is stock's.

        Args:
            positions: Those junctions.
            coord: The coordinator whose Mamba groups count.
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
            if put.num_tokens in positions
            and put.num_tokens not in own
            and put.group_id in coord.mamba_group_ids
        ]
        return states

    def tails_put(
        self, keys: Sequence[str], sizes: Sequence[Sequence[int]], res: Sequence[int]
    ) -> list[TailsPut]:
        """Return how many blocks and bytes a put wrote for junctions, by source.

        Args:
            keys: What was put.
            sizes: Bytes of each buffer, by key.
            res: Mooncake's answer by key; below 0 for a failure.
        """
        blocks: dict[str, set[TailBlock]] = {}
        num_bytes: dict[str, int] = {}
        for key, size, status in zip(keys, sizes, res, strict=False):
            block = self.tails.get(key)
            if block is not None and status >= 0:
                blocks.setdefault(block.source, set()).add(block)
                num_bytes[block.source] = num_bytes.get(block.source, 0) + sum(size)
        return [
            TailsPut(source, len(some), num_bytes[source])
            for source, some in blocks.items()
        ]

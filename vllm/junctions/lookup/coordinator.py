# SPDX-License-Identifier: Apache-2.0
"""Store coordinator that knows how far each group reaches, and where junctions are."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
    StoreSpecGroup,
)
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm.junctions.rules.boundaries import junction_boundaries


class LookupCoordinator(MooncakeStoreCoordinator):
    """The stock coordinator, plus what a lookup says beside the joint hit."""

    def full_attention_hit(
        self,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        cached_block_pool: ExternalCachedBlockPool,
    ) -> int:
        """Return how long a prefix full attention could reuse alone, in tokens.

        Asks each full-attention group on its own, from the same existence answers as
        the joint hit; a layout without any, each group. On a store that holds 15
        full-attention blocks of 256 tokens and no sliding-window tail it is 3840,
        while the joint hit is 0.

        A tail beyond what full attention reaches is not counted: nobody can use it
        before the blocks below it are back. With several full-attention groups the
        longest counts, since a request stores what the others lack while it computes.

        Source: the local counterpart is the longest length that
        ``HybridKVCacheCoordinator.find_longest_cache_hit`` sees. There too, full
        attention goes first and all other groups only shorten the hit.

        Args: See :meth:`hits_by_group`.
        """
        full_attention = [
            group
            for group in self.attention_groups
            if isinstance(group.spec, FullAttentionSpec)
        ]
        groups = full_attention or self.attention_groups
        hits = self._hits(groups, block_hashes, max_length, cached_block_pool)
        return max(hits.values(), default=0)

    def hits_by_group(
        self,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        cached_block_pool: ExternalCachedBlockPool,
    ) -> dict[int, int]:
        """Return how long a prefix each group could reuse alone, in tokens.

        Asks each group on its own, from the same existence answers as the joint
        hit. Groups that share a spec are asked together, as stock does.

        Args:
            block_hashes: Hashes of the request, one per hash unit.
            max_length: Tokens that a hit may have at most, aligned as hits are.
            cached_block_pool: The existence answers.
        """
        return self._hits(
            self.attention_groups, block_hashes, max_length, cached_block_pool
        )

    def _hits(
        self,
        groups: Sequence[StoreSpecGroup],
        block_hashes: Sequence[BlockHash],
        max_length: int,
        cached_block_pool: ExternalCachedBlockPool,
    ) -> dict[int, int]:
        num_hashed_tokens = len(block_hashes) * self.hash_block_size
        hits: dict[int, int] = {}
        for spec, group_ids, manager_cls, use_eagle in groups:
            # An EAGLE group proves a position by the block above it.
            proof = self.eagle_proof_margin_by_group.get(group_ids[0], 0)
            _, length = manager_cls.find_longest_cache_hit(
                block_hashes=cast(Any, block_hashes),
                max_length=min(max_length + proof, num_hashed_tokens),
                kv_cache_group_ids=group_ids,
                block_pool=cast(Any, cached_block_pool),
                kv_cache_spec=spec,
                drop_eagle_block=use_eagle,
                alignment_tokens=self.align_unit,
            )
            hits.update(dict.fromkeys(group_ids, length))
        return hits

    @cached_property
    def group_names(self) -> dict[int, str]:
        """Short names of the groups by id, such as ``1-SlidingWindow-64``.

        Number, kind and tokens per block, for labels and logs.
        """
        return {
            group_id: f"{group_id}-{type(group.spec).__name__.removesuffix('Spec')}"
            f"-{group.spec.block_size}"
            for group in self.attention_groups
            for group_id in group.group_ids
        }

    @property
    def align_unit(self) -> int:
        """Tokens that a hit is a multiple of: a scheduler block or a hash unit."""
        if self.enable_partial_hash_hits:
            return self.hash_block_size
        return self.lcm_block_size

    def junctions(self, hit_length: int, longest_hit_length: int) -> tuple[int, ...]:
        """Apply :func:`junction_boundaries` with this layout's numbers.

        Args:
            hit_length: Tokens of the joint hit.
            longest_hit_length: Tokens of the longest single-group hit.
        """
        return junction_boundaries(
            hit_length,
            longest_hit_length,
            self.lcm_block_size,
            bool(self.eagle_group_ids),
        )

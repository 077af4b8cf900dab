# SPDX-License-Identifier: Apache-2.0
"""Store coordinator that knows how far full attention reaches, and junction tails."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm.junctions.rules.boundaries import junction_boundaries

GroupMasks = tuple[list[bool] | None, ...]


class JunctionStoreCoordinator(MooncakeStoreCoordinator):
    """The stock coordinator, plus junctions found and junction tails stored."""

    def longest_group_hit(
        self,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        cached_block_pool: ExternalCachedBlockPool,
    ) -> int:
        """Return the longest prefix that a single group can reuse, in tokens.

        Asks each full-attention group on its own, from the same existence answers as
        the joint hit; where there is none, each group. On a store that holds 15
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
        hits = self._hits(
            full_attention or self.attention_groups,
            block_hashes,
            max_length,
            cached_block_pool,
        )
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
        groups: Sequence[Any],
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

    def store_mask(
        self,
        aligned_token_len: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        boundaries: Sequence[int] = (),
    ) -> GroupMasks:
        """Per-group store masks, with the tails at ``boundaries`` kept as well.

        ``mask[g][i]`` is True iff the i-th chunk of group ``g`` after
        ``start_token`` should be written. ``None`` (all of them) stays ``None``,
        and a Mamba group stays all False: its states travel with boundary puts.

        A junction's tail is a replay boundary's tail. The stock mask already knows
        how to keep that, EAGLE proof block included, for a prompt of a given
        length; so for each junction it is asked about the prompt whose replay
        boundary lies there.

        Source: extends ``MooncakeStoreCoordinator.store_mask``.

        Args:
            aligned_token_len: Tokens that the masks reach to.
            start_token: Tokens before the first chunk of the masks.
            num_prompt_tokens: Prompt length for the request's own replay tails.
            boundaries: Token positions of junctions; those past
                ``aligned_token_len`` have no effect yet.
        """
        masks = super().store_mask(aligned_token_len, start_token, num_prompt_tokens)
        return self.with_junction_tails(
            masks, aligned_token_len, start_token, boundaries
        )

    def with_junction_tails(
        self,
        masks: GroupMasks,
        aligned_token_len: int,
        start_token: int,
        boundaries: Sequence[int],
    ) -> GroupMasks:
        """Return store masks with the tails at ``boundaries`` added.

        Args:
            masks: Stock's masks for the same range.
            aligned_token_len: Tokens that the masks reach to.
            start_token: Tokens before the first chunk of the masks.
            boundaries: Token positions of junctions.
        """
        for position in boundaries:
            if position <= 0:
                continue
            tails = super().store_mask(
                aligned_token_len,
                start_token,
                self._prompt_replaying_at(position),
            )
            masks = tuple(
                _union(mask, tail) for mask, tail in zip(masks, tails, strict=True)
            )
        return masks

    def _prompt_replaying_at(self, position: int) -> int:
        """Length of a prompt whose only replay boundary is ``position``.

        One token more than the boundary; with EAGLE, whose replay resumes one
        scheduler block below the last full one, one block more on top.
        """
        if self.eagle_group_ids:
            return position + self.lcm_block_size + 1
        return position + 1


def _union(mask: list[bool] | None, other: list[bool] | None) -> list[bool] | None:
    if mask is None or other is None:
        return None
    return [keep or also for keep, also in zip(mask, other, strict=True)]

# SPDX-License-Identifier: Apache-2.0
"""Store coordinator that knows how far full attention reaches, and junction tails."""

from collections.abc import Sequence
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm.junctions.boundaries import junction_boundaries

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

        Args:
            block_hashes: Hashes of the request, one per hash unit.
            max_length: Tokens that a hit may have at most, aligned as hits are.
            cached_block_pool: The existence answers.
        """
        alignment_tokens = self.align_unit
        num_hashed_tokens = len(block_hashes) * self.hash_block_size
        longest = 0
        full_attention = [
            group
            for group in self.attention_groups
            if isinstance(group.spec, FullAttentionSpec)
        ]
        groups = full_attention or self.attention_groups
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
                alignment_tokens=alignment_tokens,
            )
            longest = max(longest, length)
        return longest

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

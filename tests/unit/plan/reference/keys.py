# SPDX-License-Identifier: Apache-2.0
"""Blocks of prompts as numbers for caches and as hashes for coordinators."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
)
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from tests.unit.plan.reference.trace import TRACE_BLOCK_TOKENS, Prompt

_HASH_BYTES = 8


class KeySpace:
    """Numbers for the blocks of every group, distinct across groups.

    Attributes:
        block_tokens: Tokens per block, by group.
        hash_tokens: Tokens per hash unit.
        num_keys: How many numbers there are.
    """

    def __init__(
        self, groups: Sequence[KVCacheGroupSpec], hash_tokens: int, num_blocks: int
    ) -> None:
        """Number the blocks of a trace.

        Args:
            groups: KV-cache groups.
            hash_tokens: Tokens per hash unit.
            num_blocks: Distinct trace blocks of 512 tokens.

        Raises:
            ValueError: A group's blocks do not divide the trace's.
        """
        self.block_tokens = [group.kv_cache_spec.block_size for group in groups]
        self.hash_tokens = hash_tokens
        self._first_keys = []
        self.num_keys = 0
        for block_tokens in self.block_tokens:
            if TRACE_BLOCK_TOKENS % block_tokens:
                raise ValueError(
                    f"Blocks of {block_tokens} tokens do not divide the trace's, "
                    f"{TRACE_BLOCK_TOKENS} tokens."
                )
            self._first_keys.append(self.num_keys)
            self.num_keys += num_blocks * (TRACE_BLOCK_TOKENS // block_tokens)

    def units_per_block(self, group_id: int) -> int:
        return self.block_tokens[group_id] // self.hash_tokens

    def keys(self, prompt: Prompt, group_id: int) -> np.ndarray:
        """Return the keys of a prompt's whole blocks of a group, in order."""
        # A block goes by the last of its units, as in vLLM.
        per_block = self.units_per_block(group_id)
        ends = prompt.units[per_block - 1 :: per_block]
        return self._first_keys[group_id] + ends // per_block


@dataclass(frozen=True)
class Answers:
    """What a cache has of a prompt.

    Attributes:
        pool: As a coordinator asks for it.
        reach_tokens: Nothing is cached past this.
    """

    pool: ExternalCachedBlockPool
    reach_tokens: int


class PromptBlocks:
    """One prompt's blocks in one key space."""

    def __init__(self, prompt: Prompt, space: KeySpace) -> None:
        self.num_tokens = prompt.num_tokens
        self._space = space
        self._units = prompt.units
        self.keys = [
            space.keys(prompt, group_id) for group_id in range(len(space.block_tokens))
        ]

    @cached_property
    def hashes(self) -> list[bytes]:
        """The prompt's block hashes: each unit's number."""
        blob = self._units.astype("<u8").tobytes()
        return [
            blob[start : start + _HASH_BYTES]
            for start in range(0, len(blob), _HASH_BYTES)
        ]

    def prefix_key(self, num_tokens: int) -> int:
        """Return what the prefix of so many tokens, of whole units, goes by."""
        return int(self._units[num_tokens // self._space.hash_tokens - 1])

    def answers(self, indices: Sequence[np.ndarray]) -> Answers:
        """Return the answers of a cache that has these blocks of each group."""
        exists: set[tuple[int, bytes]] = set()
        reach_tokens = 0
        hashes = self.hashes
        for group_id, found in enumerate(indices):
            if not len(found):
                continue
            per_block = self._space.units_per_block(group_id)
            units = (found + 1) * per_block - 1
            exists.update([(group_id, hashes[unit]) for unit in units.tolist()])
            end_tokens = (int(found[-1]) + 1) * self._space.block_tokens[group_id]
            reach_tokens = max(reach_tokens, end_tokens)
        pool = ExternalCachedBlockPool(self._space.hash_tokens, exists)
        return Answers(pool, reach_tokens)

    def in_order(self, indices: Sequence[np.ndarray]) -> np.ndarray:
        """Return the keys of some blocks of each group, by where they end."""
        keys = [keys[chosen] for keys, chosen in zip(self.keys, indices, strict=True)]
        ends = [
            (chosen + 1) * block_tokens
            for chosen, block_tokens in zip(
                indices, self._space.block_tokens, strict=True
            )
        ]
        order = np.argsort(np.concatenate(ends), kind="stable")
        return np.concatenate(keys)[order]

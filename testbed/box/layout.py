# SPDX-License-Identifier: Apache-2.0
"""KV-cache layouts, in the few numbers that matter to prefix caching."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

Kind = Literal["full", "mla", "swa", "swa_mla", "mamba"]

_ATTENTION_SPECS: dict[str, type[KVCacheSpec]] = {
    "full": FullAttentionSpec,
    "mla": MLAAttentionSpec,
    "swa": SlidingWindowSpec,
    "swa_mla": SlidingWindowMLASpec,
}


@dataclass(frozen=True)
class Group:
    """One KV-cache group.

    Attributes:
        kind: What its layers are.
        block_tokens: Tokens per block.
        window_tokens: Tokens that a sliding-window layer attends to, its own
            included; 0 for other kinds.
        eagle: Whether the group holds the drafter's layers.
        retained_tokens: Tokens below the window that stay for a drafter of several
            layers to compute anew (vLLM 0.33: ``extra_retained_tokens``).
    """

    kind: Kind
    block_tokens: int
    window_tokens: int = 0
    eagle: bool = False
    retained_tokens: int = 0

    def spec(self, num_speculative_blocks: int) -> KVCacheSpec:
        if self.kind == "mamba":
            return MambaSpec(
                block_size=self.block_tokens,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=num_speculative_blocks,
            )
        window = {"sliding_window": self.window_tokens} if self.window_tokens else {}
        if self.retained_tokens:
            window["extra_retained_tokens"] = self.retained_tokens
        return _ATTENTION_SPECS[self.kind](  # type: ignore[call-arg]
            block_size=self.block_tokens,
            num_kv_heads=1,
            head_size=1,
            dtype=torch.float32,
            **window,
        )


@dataclass(frozen=True)
class Layout:
    """All groups of a model.

    Attributes:
        groups: In the order of their group ids.
        hash_tokens: Tokens per block hash.
        drops_eagle_block: Whether an EAGLE/MTP drafter runs, for which hits drop
            their last matched block.
        retention_interval: As vLLM's ``prefix_cache_retention_interval``.
        mamba_junction_checkpoints: As vLLM's
            ``enable_mamba_shared_prefix_checkpoint``.
    """

    groups: tuple[Group, ...]
    hash_tokens: int
    drops_eagle_block: bool = False
    retention_interval: int | None = 0
    mamba_junction_checkpoints: bool = False

    @property
    def scheduler_block_tokens(self) -> int:
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def has_mamba(self) -> bool:
        return any(group.kind == "mamba" for group in self.groups)

    @property
    def is_sparse(self) -> bool:
        """Whether some group needs less of a prefix than all of it."""
        return self.has_mamba or any(group.window_tokens for group in self.groups)

    @property
    def units_per_page(self) -> int:
        """Hash units that the largest block holds."""
        return max(group.block_tokens for group in self.groups) // self.hash_tokens

    def kv_cache_config(self, num_blocks: int) -> KVCacheConfig:
        speculative_blocks = int(self.drops_eagle_block)
        return KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(
                    [f"layer.{index}"],
                    group.spec(speculative_blocks),
                    is_eagle_group=group.eagle,
                )
                for index, group in enumerate(self.groups)
            ],
            prefix_cache_retention_interval=self.retention_interval,
        )

# SPDX-License-Identifier: Apache-2.0
"""Real specs, groups, hashes and requests in the sizes that tests need."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from testbed.models import GEMMA3
from vllm.junctions import repairs
from vllm.junctions.core import CORE_HOOKS
from vllm.junctions.core.request import set_junctions
from vllm.junctions.store.sender import SavingCoordinator


def uninstall_hooks() -> None:
    """Make this process stock again; engines leave the hooks on."""
    CORE_HOOKS.uninstall()
    repairs.HOOKS.uninstall()


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
    )


def mla(block_size: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
    )


def swa(block_size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        sliding_window=window,
    )


def mamba(block_size: int) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((1, 8),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )


def groups(
    specs: Iterable[KVCacheSpec], eagle: Iterable[int] = ()
) -> list[KVCacheGroupSpec]:
    """One group a spec; ``eagle`` names the indices of flagged groups."""
    flagged = set(eagle)
    return [
        KVCacheGroupSpec([f"layer.{i}"], spec, is_eagle_group=i in flagged)
        for i, spec in enumerate(specs)
    ]


def deepseek_v4_groups(eagle: bool = True) -> list[KVCacheGroupSpec]:
    """The group layout of DeepSeek-V4-Flash: scheduler block 256, hash unit 4."""
    specs = [mla(256), swa(64, 128), swa(64, 128), swa(4, 8), swa(8, 128)]
    return groups(specs, eagle=(2,) if eagle else ())


def coordinator(
    group_specs: Sequence[KVCacheGroupSpec],
    hash_block_size: int,
    retention_interval: int | None = 0,
    partial_hash_hits: bool = False,
) -> SavingCoordinator:
    """Return a coordinator as a worker has it."""
    return SavingCoordinator(
        list(group_specs),
        scheduler_block_size=lcm(*(g.kv_cache_spec.block_size for g in group_specs)),
        hash_block_size=hash_block_size,
        use_eagle=any(g.is_eagle_group for g in group_specs),
        retention_interval=retention_interval,
        enable_partial_hash_hits=partial_hash_hits,
    )


def hashes(num_hashes: int, seed: str = "") -> list[BlockHash]:
    return [
        BlockHash(hashlib.sha256(f"{seed}/{i}".encode()).digest())
        for i in range(num_hashes)
    ]


def request(req_id: str = "r", num_tokens: int = 100) -> Request:
    return Request(
        request_id=req_id,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
    )


def kv_cache_config(
    group_specs: Sequence[KVCacheGroupSpec],
    hash_block_size: int,
    num_blocks: int = 1000,
    retention_interval: int | None = 0,
) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=list(group_specs),
        prefix_cache_retention_interval=retention_interval,
        hash_block_size=hash_block_size,
    )


def vllm_config(
    model_dir: Path, extra_config: Mapping[str, Any] | None = None, **transfer: Any
) -> VllmConfig:
    """A real configuration that selects the connector, for a tiny model."""
    GEMMA3.write(model_dir)
    return VllmConfig(
        model_config=ModelConfig(
            model=str(model_dir / GEMMA3.name), skip_tokenizer_init=True
        ),
        cache_config=CacheConfig(block_size=32),
        kv_transfer_config=KVTransferConfig(
            **{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
            | transfer,
            kv_connector_extra_config=dict(extra_config or {}),
        ),
    )


def find_locally(request: Request, *positions: int) -> None:
    """Give a request the local junctions that a lookup and the scheduler give it."""
    set_junctions(request, local=positions)
    request.shared_prefix_boundary = max(positions, default=0)

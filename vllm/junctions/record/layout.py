# SPDX-License-Identifier: Apache-2.0
"""The layout of a served model, as its store coordinator has it."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    MooncakeStoreCoordinator,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    UniformTypeKVCacheSpecs,
)

from vllm.junctions.record.format import GroupLayout, Layout


def layout_of(coordinator: MooncakeStoreCoordinator, **more: Any) -> Layout:
    """Return the layout that a coordinator works with.

    Args:
        coordinator: Stock's or ours.
        more: Further fields of :class:`Layout`: ``name``, ``block_bytes``, ...
    """
    return Layout(
        groups=tuple(
            _group(group.kv_cache_spec, index in coordinator.eagle_group_ids)
            for index, group in enumerate(coordinator.kv_cache_groups)
            if group.kv_cache_spec.prefix_cacheable
        ),
        scheduler_block_tokens=coordinator.lcm_block_size,
        hash_block_tokens=coordinator.hash_block_size,
        retention_interval=coordinator.retention_interval,
        partial_hits=coordinator.enable_partial_hash_hits,
        **more,
    )


def _group(spec: Any, drops: bool) -> GroupLayout:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    window = getattr(spec, "sliding_window", None) or 0
    if isinstance(spec, FullAttentionSpec):
        return GroupLayout("full", spec.block_size, drops=drops)
    if window:
        # What a drafter of several layers computes anew lies below the window.
        window += getattr(spec, "extra_retained_tokens", 0) or 0
        return GroupLayout("window", spec.block_size, window, drops)
    return GroupLayout("state", spec.block_size)


def block_bytes_of(kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes of one block of the pool, and so of one stored value.

    Groups take their blocks from one pool, so a block has room for the widest group,
    and the store worker puts whole blocks. Of one rank.

    Source: ``RankLocalStoreLayout.register_kv_caches``, which registers every layer's
    memory for every group.
    """
    sizes = [tensor.size for tensor in kv_cache_config.kv_cache_tensors]
    if sizes and kv_cache_config.num_blocks:
        return int(sum(sizes)) // kv_cache_config.num_blocks
    return max(
        (_group_bytes(group) for group in kv_cache_config.kv_cache_groups), default=0
    )


def _group_bytes(group: Any) -> int:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return sum(one.page_size_bytes for one in spec.kv_cache_specs.values())
    return int(spec.page_size_bytes) * len(group.layer_names)

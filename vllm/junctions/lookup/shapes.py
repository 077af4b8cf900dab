# SPDX-License-Identifier: Apache-2.0
"""The tails that the groups of a layout need, read from vLLM's specs and managers."""

from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    StoreSpecGroup,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm.junctions.lookup.coordinator import LookupCoordinator
from vllm.junctions.rules.tails import TailShape


def tail_shapes(coord: LookupCoordinator) -> list[TailShape]:
    """Return the tails of all sparse groups that a layout has and this module knows."""
    return [
        tail_shape(group, coord)
        for group in coord.attention_groups
        if not isinstance(group.spec, FullAttentionSpec)
        and issubclass(group.manager_cls, (MambaManager, SlidingWindowManager))
        for _ in group.group_ids
    ]


def tail_shape(group: StoreSpecGroup, coord: LookupCoordinator) -> TailShape:
    """Return the tail that each group of a sparse spec needs.

    Args:
        group: Groups of one spec, of sliding windows or Mamba.
        coord: The coordinator that they are groups of.
    """
    spec: Any = group.spec
    if issubclass(group.manager_cls, MambaManager):
        # Under partial hash hits a state can stand for every hash unit.
        block_tokens = min(spec.block_size, coord.align_unit)
        return TailShape(block_tokens, coord.align_unit, (1, 1))
    manager_cls = cast(type[SlidingWindowManager], group.manager_cls)
    without, with_proof = (
        max(
            manager_cls._contiguous_blocks_for_hit(
                spec.sliding_window, spec.block_size, drop
            ),
            1,
        )
        for drop in (False, True)
    )
    return TailShape(
        spec.block_size, coord.align_unit, (without, with_proof), group.use_eagle
    )

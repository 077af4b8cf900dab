# SPDX-License-Identifier: Apache-2.0
"""Cache managers: derive local junctions, and keep tails and states at all of them."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.junctions.core.request import (
    set_junctions,
    shared_prefix_boundaries,
    with_scalar,
)
from vllm.junctions.rules.boundaries import junction_boundaries
from vllm.junctions.seams.registry import Hook
from vllm.junctions.seams.switches import is_on

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

# The switch that our connector turns on for its engine's KVCacheManager.
JUNCTIONS = "junctions"


def drops_eagle_block(coordinator: "KVCacheCoordinator") -> bool:
    """Return whether any group of a local cache drops its last matched block.

    vLLM 0.33 keeps groups flagged that do not drop (look-ahead hashes) and names
    those that do; 0.32 knows the flagged ones only.
    """
    dropping = getattr(coordinator, "drop_eagle_group_ids", None)
    return bool(coordinator.eagle_group_ids if dropping is None else dropping)


def _get_computed_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_computed_blocks(
        self: "KVCacheManager", request: "Request", *args: Any, **kwargs: Any
    ) -> tuple[Any, int, int]:
        blocks, hit_length, longest = original(self, request, *args, **kwargs)
        if is_on(self, JUNCTIONS):
            local = junction_boundaries(
                hit_length,
                longest,
                self.coordinator.scheduler_block_size,
                drops_eagle_block(self.coordinator),
            )
            set_junctions(request, local=local)
        return blocks, hit_length, longest

    return get_computed_blocks


def _cache_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cache_blocks(
        self: Any,
        request: "Request",
        *args: Any,
        replay_boundaries: Sequence[int],
        **kwargs: Any,
    ) -> Any:
        junctions = shared_prefix_boundaries(request)
        if junctions:
            replay_boundaries = (*replay_boundaries, *junctions)
        return original(
            self, request, *args, replay_boundaries=replay_boundaries, **kwargs
        )

    return cache_blocks


def _cache_partial_tail_block(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cache_partial_tail_block(
        self: Any, request: "Request", num_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        checkpoint = self._checkpoints.get(request.request_id)
        position = num_tokens if checkpoint is None else checkpoint[0]
        if position in shared_prefix_boundaries(request):
            request = with_scalar(request, position)
        return original(self, request, num_tokens, *args, **kwargs)

    return cache_partial_tail_block


_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"

HOOKS = (
    Hook(
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        parameters=("request",),
        why="A local hit reports one position; under EAGLE there are two.",
        how="Sets the request's local junctions from what the original returns.",
        remove_when="get_computed_blocks returns all shared-prefix boundaries.",
        guarded_by="tests/unit/core/test_managers.py",
        replace=_get_computed_blocks,
    ),
    Hook(
        target=f"{_MANAGERS}:SingleTypeKVCacheManager.cache_blocks",
        parameters=("request", "num_tokens", "retention_interval", "replay_boundaries"),
        why="Sparse retention keeps tails at replay boundaries and one scalar only.",
        how="Hands the request's junctions in with the replay boundaries.",
        remove_when="cache_blocks reads several shared-prefix boundaries.",
        guarded_by="tests/engine/test_modes.py",
        replace=_cache_blocks,
    ),
    Hook(
        target=f"{_MANAGERS}:MambaManager._cache_partial_tail_block",
        parameters=("request", "num_tokens", "retention_interval"),
        why="Mamba keeps a checkpoint only where its position equals the scalar.",
        how="Hands in the request as it is with that junction for its scalar.",
        remove_when="Mamba compares with several shared-prefix boundaries.",
        guarded_by="tests/unit/core/test_managers.py",
        replace=_cache_partial_tail_block,
    ),
)

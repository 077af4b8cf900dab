# SPDX-License-Identifier: Apache-2.0
"""Cache managers: derive local junctions, and keep tails and states at all of them."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.junctions.core.request import (
    LocalJunction,
    focused,
    shared_prefix_boundaries,
)
from vllm.junctions.rules.boundaries import junction_boundaries
from vllm.junctions.seams.registry import Hook

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

# Name of the switch on KVCacheManager: only an engine whose connector is ours
# turns it on, so that another engine in the same process stays stock.
ENABLED = "junctions_enabled"


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
        if longest and getattr(self, ENABLED):
            positions = junction_boundaries(
                hit_length,
                longest,
                self.coordinator.scheduler_block_size,
                drops_eagle_block(self.coordinator),
            )
            longest = LocalJunction(longest, positions)
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
        if position not in shared_prefix_boundaries(request):
            return original(self, request, num_tokens, *args, **kwargs)
        with focused(request, position):
            return original(self, request, num_tokens, *args, **kwargs)

    return cache_partial_tail_block


_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"

HOOKS = (
    Hook(
        target=f"vllm.v1.core.kv_cache_manager:KVCacheManager.{ENABLED}",
        parameters=None,
        why="Hooks are per process, engines are not: one may not use the connector.",
        how="A class attribute, False; our connector sets it on its own manager.",
        remove_when="The other hooks of this module go.",
        guarded_by="tests/unit/core/test_managers.py",
        replace=lambda _original: False,
    ),
    Hook(
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        parameters=("request",),
        why="A local hit reports one position; under EAGLE there are two.",
        how="Passes the original's scalar on as a number that carries them all.",
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
        guarded_by="tests/unit/core/test_managers.py",
        replace=_cache_blocks,
    ),
    Hook(
        target=f"{_MANAGERS}:MambaManager._cache_partial_tail_block",
        parameters=("request", "num_tokens", "retention_interval"),
        why="Mamba keeps a checkpoint only where its position equals the scalar.",
        how="Shows the checkpoint's position as the scalar when it is a junction.",
        remove_when="Mamba compares with several shared-prefix boundaries.",
        guarded_by="tests/unit/core/test_managers.py",
        replace=_cache_partial_tail_block,
    ),
)

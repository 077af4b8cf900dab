# SPDX-License-Identifier: Apache-2.0
"""Scheduler: Mamba chunks stop at every junction; failed loads reserve no memory."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.junctions.hooks.registry import Hook
from vllm.junctions.hooks.request import focused, shared_prefix_boundaries


def _mamba_block_aligned_split(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mamba_block_aligned_split(
        self: Any, request: Any, *args: Any, **kwargs: Any
    ) -> int:
        def split_at(junction: int) -> int:
            with focused(request, junction):
                return original(self, request, *args, **kwargs)

        # Each call ends the chunk at the earliest of its own stops, so the
        # smallest outcome is the earliest stop of all junctions together.
        return min(split_at(j) for j in shared_prefix_boundaries(request) or (0,))

    return mamba_block_aligned_split


def _update_waiting_for_remote_kv(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_waiting_for_remote_kv(self: Any, request: Any) -> None:
        load_failed = request.request_id in self.failed_recving_kv_req_ids
        original(self, request)
        if load_failed and not request.num_computed_tokens:
            self._inflight_prefills.discard(request)

    return update_waiting_for_remote_kv


HOOKS = (
    Hook(
        target="vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
        parameters=(
            "request",
            "num_new_tokens",
            "num_new_local_computed_tokens",
            "num_external_computed_tokens",
        ),
        why=(
            "A Mamba state can be kept only where a prefill chunk ends, and chunks "
            "end at one scalar junction."
        ),
        how="Asks the original once per junction and takes the shortest chunk.",
        remove_when="The split reads several shared-prefix boundaries.",
        guarded_by="tests/unit/hooks/test_core_scheduler.py",
        replace=_mamba_block_aligned_split,
    ),
    Hook(
        target="vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv",
        parameters=("request",),
        why=(
            "A request whose load failed gives its blocks back but keeps the "
            "reservation that the load had. Its next load has to fit beside that, so "
            "a request of more than half of the KV cache waits for itself, for ever."
        ),
        how="Drops the reservation of a request that starts from nothing again.",
        remove_when="A failed load's request leaves vLLM's in-flight prefills.",
        guarded_by="tests/engine/test_faults.py",
        replace=_update_waiting_for_remote_kv,
    ),
)

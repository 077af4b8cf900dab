# SPDX-License-Identifier: Apache-2.0
"""Scheduler: Mamba chunks stop at every junction; loads do not wait for ever.

The last two hooks mend what hits from the store bring about more often than anything
else does: requests that hold, or reserve, KV blocks while they wait.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm.junctions.core.request import focused, shared_prefix_boundaries
from vllm.junctions.seams.registry import Hook


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


# Passes in a row in which nothing could be scheduled: enough for blocks of saves that
# are about to land, at the pace of an engine without work.
_MAX_IDLE_PASSES = 16


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        idle_passes = 0
        if not output.total_num_scheduled_tokens and not self.running:
            victim = _last_loaded_behind_another(self)
            if victim is not None:
                idle_passes = getattr(self, "_junctions_idle_passes", 0) + 1
            if idle_passes > _MAX_IDLE_PASSES:
                _give_back_memory(self, victim)
                idle_passes = 0
        self._junctions_idle_passes = idle_passes
        return output

    return schedule


def _last_loaded_behind_another(scheduler: Any) -> Any | None:
    """Return the last request that holds what it loaded, behind others like it.

    None while a load is under way: whatever it holds may be free soon.
    """
    waiting = list(scheduler.kv_holding_waiting)
    if scheduler._pause_state != PauseState.UNPAUSED or any(
        request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        and request.request_id not in scheduler.finished_recving_kv_req_ids
        for request in waiting
    ):
        return None
    loaded = [request for request in waiting[1:] if request.num_computed_tokens]
    return loaded[-1] if loaded else None


def _give_back_memory(scheduler: Any, request: Any) -> None:
    """Let a request wait without KV blocks; what they hold stays cached for it."""
    # Caches what was loaded, and makes the request one that waits as others do.
    scheduler._handle_blocked_waiting_request(request)
    scheduler.kv_cache_manager.free(request)
    scheduler._inflight_prefills.discard(request)
    request.num_computed_tokens = 0
    scheduler.kv_holding_waiting.remove_request(request)
    scheduler.waiting.prepend_request(request)


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
        guarded_by="tests/unit/core/test_mamba_chunks.py",
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
    Hook(
        target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
        parameters=(),
        why=(
            "Requests whose loads together fill the KV cache wait for each other's "
            "blocks, for ever: only running requests are preempted."
        ),
        how=(
            "After some passes without work, lets the loaded request that came last "
            "wait without blocks."
        ),
        remove_when="vLLM preempts loaded requests, or admits no more than can run.",
        guarded_by="tests/engine/test_box.py",
        replace=_schedule,
    ),
)

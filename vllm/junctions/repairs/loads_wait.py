# SPDX-License-Identifier: Apache-2.0
"""Requests whose loads together fill the KV cache do not wait for each other.

A request gives its blocks back only if waiting is certain to be for ever: in a pass
that scheduled nothing, an allocation was refused to a request that holds blocks, and
nothing that could free any is running, loading or being saved. Who gives back is a
request whose load has finished. Never one that waits for input: what it has computed
is its context, and is lost with its blocks.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm.junctions.repairs.record import SCHEDULER, Repair
from vllm.junctions.seams.registry import Hook
from vllm.junctions.seams.switches import is_on

NAME = "loads_wait"
# The request that was refused blocks last in the pass, kept by the cache manager.
_REFUSED = "_loads_wait_refused"


def _allocate_slots(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = original(self, request, *args, **kwargs)
        if blocks is None and is_on(self, NAME):
            setattr(self, _REFUSED, request)
        return blocks

    return allocate_slots


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager = self.kv_cache_manager
        if not is_on(manager, NAME):
            return original(self, *args, **kwargs)
        setattr(manager, _REFUSED, None)
        output = original(self, *args, **kwargs)
        refused = getattr(manager, _REFUSED)
        if refused is not None and not output.total_num_scheduled_tokens:
            giver = _who_gives_back(self, refused)
            if giver is not None:
                _give_back(self, giver)
        return output

    return schedule


def _who_gives_back(scheduler: Any, refused: Any) -> Any | None:
    """Return the last loaded request besides ``refused``; None if time may help."""
    holders = list(scheduler.kv_holding_waiting)
    if refused not in holders or _something_may_free_blocks(scheduler, holders):
        return None
    loaded = [
        request
        for request in holders
        if request is not refused
        and not request.resumable
        and (request.num_computed_tokens or _waits_for_load(request))
    ]
    return loaded[-1] if loaded else None


def _something_may_free_blocks(scheduler: Any, holders: list[Any]) -> bool:
    return bool(
        scheduler._pause_state != PauseState.UNPAUSED
        or scheduler.running
        or scheduler.deferred_frees
        # Saves hold blocks; so do requests that ended while they loaded.
        or scheduler.connector.has_pending_push_work()
        or scheduler.has_finished_requests()
        or any(
            _waits_for_load(request)
            and request.request_id not in scheduler.finished_recving_kv_req_ids
            for request in holders
        )
    )


def _waits_for_load(request: Any) -> bool:
    return bool(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)


def _give_back(scheduler: Any, request: Any) -> None:
    """Let a request wait without KV blocks; what they hold stays cached for it."""
    # Caches what was loaded, and makes the request one that waits as others do.
    scheduler._handle_blocked_waiting_request(request)
    scheduler.kv_cache_manager.free(request)
    scheduler._inflight_prefills.discard(request)
    request.num_computed_tokens = 0
    scheduler.kv_holding_waiting.remove_request(request)
    scheduler.waiting.prepend_request(request)


REPAIR = Repair(
    name=NAME,
    fault=(
        "Requests whose loads together fill the KV cache wait for each other's blocks "
        "for ever: only running requests are preempted."
    ),
    shown_by=(
        "tests/engine/test_box.py::"
        "test_loaded_requests_do_not_wait_for_each_others_memory"
    ),
    versions=("0.32.0", "0.33.0"),
    hooks=(
        Hook(
            target="vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            parameters=("request", "num_new_tokens"),
            why="The outcome of a pass does not say whom it refused blocks.",
            how="Notes the request that was refused.",
            remove_when="The next hook goes.",
            guarded_by="tests/engine/test_box.py",
            replace=_allocate_slots,
        ),
        Hook(
            target=f"{SCHEDULER}.schedule",
            parameters=(),
            why="Loaded requests that wait to run are never preempted.",
            how="After a pass that proves them stuck, the last gives its blocks back.",
            remove_when="vLLM preempts loaded requests, or admits what can run.",
            guarded_by="tests/engine/test_box.py",
            replace=_schedule,
        ),
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""A request may be preempted and come back in one pass: resets do that.

``/pause?mode=keep`` with ``clear_cache`` (its default) and
``/reset_prefix_cache?reset_running_requests=true`` preempt every running request;
the next pass of the scheduler names them as preempted and resumes them.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

from vllm.junctions.repairs.record import STORE_SCHEDULER, Repair
from vllm.junctions.seams.registry import Hook
from vllm.junctions.seams.switches import is_on

NAME = "same_pass_resume"


def _build_connector_meta(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        preempted = scheduler_output.preempted_req_ids
        if not preempted or not is_on(self, NAME):
            return original(self, scheduler_output)
        gone = preempted - _back_already(self, scheduler_output)
        if gone == preempted:
            return original(self, scheduler_output)
        without = copy.copy(scheduler_output)
        without.preempted_req_ids = gone
        meta = original(self, without)
        # The workers forget what they keep of each of them.
        meta.preempted_req_ids = preempted
        return meta

    return build_connector_meta


def _back_already(store_scheduler: Any, scheduler_output: Any) -> set[str]:
    """Return requests that got blocks in the pass that the output is of."""
    return (
        {new.req_id for new in scheduler_output.scheduled_new_reqs}
        | set(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        | {
            req_id
            for req_id, load_spec in store_scheduler.load_specs.items()
            if load_spec.can_load
        }
    )


REPAIR = Repair(
    name=NAME,
    fault=(
        "The store's scheduler forgets preempted requests after the pass in which "
        "they came back, and then looks them up: the engine dies with a TypeError, "
        "or a request whose load was to start never ends."
    ),
    shown_by=(
        "tests/engine/test_repairs.py::"
        "test_a_request_that_is_preempted_and_back_in_one_pass_ends"
    ),
    versions=("0.32.0", "0.33.0"),
    hooks=(
        Hook(
            target=f"{STORE_SCHEDULER}.build_connector_meta",
            parameters=("scheduler_output",),
            why="What came back is forgotten with what was preempted.",
            how="Names only those as preempted that are not back yet.",
            remove_when="vLLM's store scheduler forgets before it remembers.",
            guarded_by="tests/engine/test_repairs.py",
            replace=_build_connector_meta,
        ),
    ),
)

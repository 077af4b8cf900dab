# SPDX-License-Identifier: Apache-2.0
"""A request may be preempted and come back in one pass: resets do that.

``/pause?mode=keep`` with ``clear_cache`` (its default) and
``/reset_prefix_cache?reset_running_requests=true`` preempt every running request;
the next pass of the scheduler names them as preempted and resumes them.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm.junctions.repairs.record import STORE_SCHEDULER, Repair
from vllm.junctions.repairs.step import step_with
from vllm.junctions.seams.registry import Hook
from vllm.junctions.seams.switches import is_on

NAME = "same_pass_resume"
# Requests that got blocks in this pass, kept by the store's scheduler.
_GOT_BLOCKS = "_same_pass_got_blocks"


def _build_connector_meta(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        if not is_on(self, NAME):
            return original(self, scheduler_output)
        preempted = scheduler_output.preempted_req_ids
        got_blocks = self.__dict__.pop(_GOT_BLOCKS, ())
        if not preempted or preempted.isdisjoint(got_blocks):
            return original(self, scheduler_output)
        gone = preempted.difference(got_blocks)
        meta = original(self, step_with(scheduler_output, preempted_req_ids=gone))
        # The workers forget what they keep of each of them.
        meta.preempted_req_ids = preempted
        return meta

    return build_connector_meta


def _update_state_after_alloc(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_state_after_alloc(
        self: Any, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        original(self, request, blocks, num_external_tokens)
        if is_on(self, NAME):
            self.__dict__.setdefault(_GOT_BLOCKS, set()).add(request.request_id)

    return update_state_after_alloc


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
            target=f"{STORE_SCHEDULER}.update_state_after_alloc",
            parameters=("request", "blocks", "num_external_tokens"),
            why="The outcome of a pass does not say who came back to load.",
            how="Notes who got blocks in the pass.",
            remove_when="The next hook goes.",
            guarded_by="tests/engine/test_repairs.py",
            replace=_update_state_after_alloc,
        ),
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

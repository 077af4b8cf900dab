# SPDX-License-Identifier: Apache-2.0
"""Draft rows that pad a speculative step are not saved as if they were tokens."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.junctions.repairs.record import STORE_SCHEDULER, Repair
from vllm.junctions.repairs.step import step_with
from vllm.junctions.seams.registry import Hook
from vllm.junctions.seams.switches import is_on

NAME = "padding_rows"


def _build_connector_meta(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        if is_on(self, NAME) and scheduler_output.scheduled_spec_decode_tokens:
            scheduler_output = _but_for_padding(self, scheduler_output)
        return original(self, scheduler_output)

    return build_connector_meta


def _but_for_padding(store_scheduler: Any, scheduler_output: Any) -> Any:
    """Return the step with only real tokens of requests that enter with it."""
    scheduled = scheduler_output.num_scheduled_tokens
    requests = store_scheduler._unfinished_requests
    real = {
        req_id: max(requests[req_id][0].num_tokens - num_computed_tokens, 0)
        for req_id, num_computed_tokens in _entering(scheduler_output)
        if req_id in requests
    }
    if all(scheduled[req_id] <= num_real for req_id, num_real in real.items()):
        return scheduler_output
    clipped = {
        req_id: min(scheduled[req_id], num_real) for req_id, num_real in real.items()
    }
    return step_with(scheduler_output, num_scheduled_tokens=scheduled | clipped)


def _entering(scheduler_output: Any) -> list[tuple[str, int]]:
    """Return id and computed tokens of each request that enters with a step."""
    cached = scheduler_output.scheduled_cached_reqs
    new = [
        (r.req_id, r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs
    ]
    return new + [
        (req_id, num_computed_tokens)
        for req_id, num_computed_tokens in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        )
        if req_id in cached.resumed_req_ids
    ]


REPAIR = Repair(
    name=NAME,
    fault=(
        "With speculative decoding, a request that enters with a single token left to "
        "compute is padded with draft rows, and those are counted as tokens to save: "
        "a block that ends on one is stored under the hash of tokens that are "
        "sampled later, and a sibling loads wrong KV."
    ),
    shown_by=(
        "tests/engine/test_field_bugs.py::"
        "test_01_padding_rows_of_a_speculative_step_are_not_stored"
    ),
    versions=("0.32.0", "0.33.0"),
    hooks=(
        Hook(
            target=f"{STORE_SCHEDULER}.build_connector_meta",
            parameters=("scheduler_output",),
            why="Draft rows are scheduled, but hold no token.",
            how="Hands in a step that counts only real tokens of entering requests.",
            remove_when="vLLM's store scheduler counts real tokens.",
            guarded_by="tests/engine/test_field_bugs.py",
            replace=_build_connector_meta,
        ),
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""A request that consists of prompt embeddings does not end the engine."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.junctions.repairs.record import STORE_SCHEDULER, Repair
from vllm.junctions.repairs.step import step_with
from vllm.junctions.seams.registry import Hook
from vllm.junctions.seams.switches import is_on

NAME = "prompt_embeds"


def _build_connector_meta(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        if is_on(self, NAME) and any(
            map(_has_no_tokens, scheduler_output.scheduled_new_reqs)
        ):
            scheduler_output = _with_tokens(self, scheduler_output)
        return original(self, scheduler_output)

    return build_connector_meta


def _has_no_tokens(new_request: Any) -> bool:
    return (
        new_request.prompt_token_ids is None and new_request.prefill_token_ids is None
    )


def _with_tokens(store_scheduler: Any, scheduler_output: Any) -> Any:
    """Return the step with the token ids that vLLM puts in the place of embeddings.

    The store wants their number. What they are is in the block hashes.
    """
    requests = store_scheduler._unfinished_requests
    filled = [
        replace(new, prefill_token_ids=list(requests[new.req_id][0].all_token_ids))
        if _has_no_tokens(new)
        else new
        for new in scheduler_output.scheduled_new_reqs
    ]
    return step_with(scheduler_output, scheduled_new_reqs=filled)


REPAIR = Repair(
    name=NAME,
    fault=(
        "The store's scheduler asserts that a request has token ids; one with prompt "
        "embeddings alone has none, and the engine dies."
    ),
    shown_by="tests/engine/test_repairs.py::test_prompt_embeddings_alone_are_served",
    versions=("0.32.0", "0.33.0"),
    hooks=(
        Hook(
            target=f"{STORE_SCHEDULER}.build_connector_meta",
            parameters=("scheduler_output",),
            why="An assertion about one request ends all of them.",
            how="Hands in the placeholder ids that the request itself has.",
            remove_when="vLLM's store scheduler takes requests without token ids.",
            guarded_by="tests/engine/test_repairs.py",
            replace=_build_connector_meta,
        ),
    ),
)

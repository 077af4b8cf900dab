# SPDX-License-Identifier: Apache-2.0
"""A hit that never loads is not offered for ever.

Under ``kv_load_failure_policy=recompute`` vLLM asks for hits again once a load has
failed. A key that exists but never loads would be offered, and fail, without end.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm.junctions.repairs.record import STORE_SCHEDULER, Repair
from vllm.junctions.seams.outcomes import failed_loads
from vllm.junctions.seams.registry import Hook
from vllm.junctions.seams.switches import is_on

NAME = "endless_loads"
# One more than none: a load that failed by chance succeeds at the second attempt,
# and where a block is gone the second lookup names the junction to save anew.
MAX_FAILED_LOADS = 2
# Failed loads by request id, kept by the store's scheduler for unfinished requests.
_COUNTS = "_endless_loads_counts"


def num_failed_loads(store_scheduler: Any) -> dict[str, int]:
    """Return how many loads failed, by the id of a request that has not ended."""
    counts: dict[str, int] = store_scheduler.__dict__.setdefault(_COUNTS, {})
    return counts


def _update_connector_output(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_connector_output(self: Any, connector_output: Any) -> None:
        original(self, connector_output)
        if is_on(self, NAME):
            counts = num_failed_loads(self)
            for req_id in failed_loads(self, connector_output):
                counts[req_id] = counts.get(req_id, 0) + 1

    return update_connector_output


def _get_num_new_matched_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_num_new_matched_tokens(
        self: Any, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        matched: tuple[int | None, bool] = original(self, request, num_computed_tokens)
        if not is_on(self, NAME) or matched[0] is None:
            return matched
        if num_failed_loads(self).get(request.request_id, 0) < MAX_FAILED_LOADS:
            return matched
        self.load_specs.pop(request.request_id, None)
        return 0, False

    return get_num_new_matched_tokens


def _build_connector_meta(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        meta = original(self, scheduler_output)
        if is_on(self, NAME):
            for req_id in scheduler_output.finished_req_ids:
                num_failed_loads(self).pop(req_id, None)
        return meta

    return build_connector_meta


REPAIR = Repair(
    name=NAME,
    fault=(
        "With kv_load_failure_policy=recompute, a key that exists but never loads, or "
        "whose value has another size, is looked up and loaded without end; its "
        "request never ends."
    ),
    shown_by=(
        "tests/engine/test_faults.py::"
        "test_stock_asks_for_a_key_that_never_loads_without_end"
    ),
    versions=("0.32.0", "0.33.0"),
    hooks=(
        Hook(
            target=f"{STORE_SCHEDULER}.update_connector_output",
            parameters=("connector_output",),
            why="Nothing counts failed loads.",
            how="Counts them, for requests that have not ended.",
            remove_when="vLLM bounds the loads that it tries for a request.",
            guarded_by="tests/engine/test_faults.py",
            replace=_update_connector_output,
        ),
        Hook(
            target=f"{STORE_SCHEDULER}.get_num_new_matched_tokens",
            parameters=("request", "num_computed_tokens"),
            why="The same hit is offered again after its load failed.",
            how="After two failed loads a request is offered no hit.",
            remove_when="vLLM bounds the loads that it tries for a request.",
            guarded_by="tests/engine/test_faults.py",
            replace=_get_num_new_matched_tokens,
        ),
        Hook(
            target=f"{STORE_SCHEDULER}.build_connector_meta",
            parameters=("scheduler_output",),
            why="Nothing may be kept of a request that ended.",
            how="Forgets requests that the step names as finished.",
            remove_when="The other hooks of this repair go.",
            guarded_by="tests/engine/test_faults.py",
            replace=_build_connector_meta,
        ),
    ),
)

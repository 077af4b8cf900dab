# SPDX-License-Identifier: Apache-2.0
"""A failed load's reservation of KV blocks goes with the load."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.junctions.repairs.record import SCHEDULER, Repair
from vllm.junctions.seams.registry import Hook
from vllm.junctions.seams.switches import is_on

NAME = "load_reservation"


def _update_waiting_for_remote_kv(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_waiting_for_remote_kv(self: Any, request: Any) -> None:
        load_failed = request.request_id in self.failed_recving_kv_req_ids
        original(self, request)
        if (
            load_failed
            and not request.num_computed_tokens
            and is_on(self.kv_cache_manager, NAME)
        ):
            self._inflight_prefills.discard(request)

    return update_waiting_for_remote_kv


REPAIR = Repair(
    name=NAME,
    fault=(
        "With kv_load_failure_policy=recompute, a request whose load failed leaves "
        "the load's memory reserved, and its next attempt has to fit beside that: one "
        "that needs more than half of the KV cache waits for itself for ever, and "
        "everything behind it waits with it."
    ),
    shown_by=(
        "tests/engine/test_faults.py::"
        "test_a_large_request_whose_load_failed_does_not_wait_for_itself"
    ),
    versions=("0.32.0", "0.33.0"),
    hooks=(
        Hook(
            target=f"{SCHEDULER}._update_waiting_for_remote_kv",
            parameters=("request",),
            why="A request that starts from nothing again reserves nothing.",
            how="Drops the reservation of a request whose load failed as a whole.",
            remove_when="A failed load's request leaves vLLM's in-flight prefills.",
            guarded_by="tests/engine/test_faults.py",
            replace=_update_waiting_for_remote_kv,
        ),
    ),
)

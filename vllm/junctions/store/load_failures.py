# SPDX-License-Identifier: Apache-2.0
"""How often a request is offered store hits after a load failed.

Under ``kv_load_failure_policy=recompute`` vLLM asks for hits again once a load has
failed. A key that exists but never loads would be offered, and fail, without end.
"""

from collections.abc import Iterable

# One more than none: a load that failed by chance succeeds at the second attempt,
# and where a block is gone the second lookup names the junction to save anew.
MAX_FAILED_LOADS = 2


class LoadFailures:
    """Failed loads by request, until the request ends."""

    def __init__(self) -> None:
        self._num_failed_by_request: dict[str, int] = {}

    def add(self, req_id: str) -> None:
        """Note that a load failed."""
        num_failed = self._num_failed_by_request.get(req_id, 0)
        self._num_failed_by_request[req_id] = num_failed + 1

    def are_too_many(self, req_id: str) -> bool:
        """Return whether a request has to do without the store from now on."""
        return self._num_failed_by_request.get(req_id, 0) >= MAX_FAILED_LOADS

    def discard(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for req_id in req_ids:
            self._num_failed_by_request.pop(req_id, None)

    def __len__(self) -> int:
        return len(self._num_failed_by_request)

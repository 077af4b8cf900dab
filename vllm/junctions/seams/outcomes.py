# SPDX-License-Identifier: Apache-2.0
"""What a worker's report says of loads."""

from typing import Any


def failed_loads(store_scheduler: Any, connector_output: Any) -> set[str]:
    """Return the unfinished requests of which a report says that their load failed.

    Models with several groups report them by request, those with one by block.

    Args:
        store_scheduler: The ``MooncakeStoreScheduler`` that the report is for.
        connector_output: The report. vLLM's own suites hand in some that lack
            whatever they don't look at.
    """
    failed = set(getattr(connector_output, "failed_recving", None) or ())
    block_ids = getattr(connector_output, "invalid_block_ids", None) or set()
    if block_ids:
        failed |= {
            req_id
            for req_id, (_, groups) in store_scheduler._unfinished_requests.items()
            if any(not block_ids.isdisjoint(group) for group in groups)
        }
    return failed & store_scheduler._unfinished_request_ids

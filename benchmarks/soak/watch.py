# SPDX-License-Identifier: Apache-2.0
"""What an engine holds, seen from inside: a thread that writes it to a file.

A plugin of the test bed (``testbed.plugins``) calls :func:`register` in
every process of a server. It only looks: sizes of tables, twice a second.
"""

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

DIRECTORY_VARIABLE = "SOAK_WATCH_DIR"
_PERIOD_SECONDS = 0.5

# Table names by the class that has them. All are empty in an engine at rest.
_SCHEDULER_TABLES = (
    "_pinned_saves",
    "_request_trackers",
    "_unfinished_requests",
    "_unfinished_request_ids",
    "_finished_partial_tail_metas",
    "load_specs",
    "_junction_tracker",
)
_CLIENT_TABLES = ("futures", "_junctions_by_request")
_SENDER_TABLES = ("stored_requests", "_skip_store_requests", "_saved_offset")


class Holdings(msgspec.Struct):
    """What one process holds: sizes by name, and when that was (monotonic)."""

    seconds: float
    sizes: dict[str, int]


def register() -> None:
    """Watch the store connector of this process, if it is an engine's."""
    # The API server, the only process without a parent, has no connector.
    if multiprocessing.parent_process() is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
        scheduler,
        worker,
    )

    _watch(scheduler.MooncakeStoreScheduler, _scheduler_sizes)
    _watch(worker.KVCacheStoreSendingThread, _sender_sizes)


def _watch(cls: type, sizes: Callable[[Any], dict[str, int]]) -> None:
    construct = cls.__init__
    if hasattr(construct, "__wrapped__"):
        return

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        path = Path(os.environ[DIRECTORY_VARIABLE]) / f"{cls.__name__}.json"
        threading.Thread(
            target=_write_for_ever, args=(path, self, sizes), daemon=True
        ).start()

    cls.__init__ = constructed  # type: ignore[misc]


def _write_for_ever(
    path: Path, watched: Any, sizes: Callable[[Any], dict[str, int]]
) -> None:
    scratch = path.with_suffix(".new")
    while True:
        holdings = Holdings(time.monotonic(), sizes(watched))
        scratch.write_bytes(msgspec.json.encode(holdings))
        scratch.replace(path)
        time.sleep(_PERIOD_SECONDS)


def _table_sizes(owner: Any, names: tuple[str, ...]) -> dict[str, int]:
    return {name: len(getattr(owner, name)) for name in names if hasattr(owner, name)}


def _scheduler_sizes(scheduler: Any) -> dict[str, int]:
    sizes = _table_sizes(scheduler, _SCHEDULER_TABLES)
    sizes |= _table_sizes(scheduler.client, _CLIENT_TABLES)
    pool = scheduler._gpu_block_pool
    if pool is not None:
        # The null block always counts as used.
        sizes["blocks"] = pool.num_gpu_blocks - pool.get_num_free_blocks() - 1
    return sizes


def _sender_sizes(sender: Any) -> dict[str, int]:
    return {
        **_table_sizes(sender, _SENDER_TABLES),
        "queued_saves": sender.request_queue.qsize(),
    }


def read_holdings(directory: Path) -> dict[str, Holdings]:
    """Return what each watched object last wrote, by class name."""
    return {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Holdings)
        for path in directory.glob("*.json")
    }


def held(directory: Path, since_seconds: float) -> dict[str, int] | None:
    """Return what is not empty; None if something has not reported since then.

    Args:
        directory: Where the processes write.
        since_seconds: Monotonic time after which a report counts.
    """
    reports = read_holdings(directory)
    if len(reports) < 2 or any(
        report.seconds < since_seconds for report in reports.values()
    ):
        return None
    return {
        f"{name}.{table}": size
        for name, report in reports.items()
        for table, size in report.sizes.items()
        if size
    }

# SPDX-License-Identifier: Apache-2.0
"""Puts over TCP that fit into the queue of transfers to a peer.

What stock does: it puts all blocks of a save in one call, with a transfer for each
layer of each block. Mooncake (0.3.13) queues 2,048 transfers to a peer; what comes on
top fails, and a call of many more, 256 keys of 40 buffers say, fails as a whole after
60 s and leaves the peer out of reach.

What this does: it makes calls of few transfers, one after the other.

``REPAIR`` says where stock shows it, and when this can go. *Reads* need none of it
where they land (:mod:`vllm.junctions.repairs.late_loads`): they make one transfer a
key.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.junctions.repairs.batches import batches
from vllm.junctions.repairs.record import Repair

REPAIR = Repair(
    name="short_puts",
    fault=(
        "Over TCP, a save of many blocks overflows the queue of transfers to a peer: "
        "it fails in part, or as a whole after 60 s with the peer out of reach."
    ),
    shown_by=(
        "tests/e2e/test_late_transfers.py::"
        "test_mooncake_fails_puts_that_do_not_fit_its_queue"
    ),
    versions=("0.32.0",),
    remove_when="Mooncake waits for room in the queue of transfers to a peer.",
)

# A quarter of the queue: load threads use it as well.
MAX_TRANSFERS = 512
_TRANSFER_FAIL = -800
# Far more than a peer takes that is gone, far less than Mooncake waits.
_LONG_SECONDS = 5.0


def shorten_puts(worker: Any, protocol: str) -> bool:
    """Let a worker's save thread make short calls.

    Source: wraps the store of vLLM's ``KVCacheStoreSendingThread``.

    Args:
        worker: A ``MooncakeStoreWorker`` whose KV caches are registered.
        protocol: Mooncake's, from its configuration; only TCP has the queue.

    Returns:
        Whether it does.
    """
    thread = worker.kv_send_thread
    if protocol != "tcp" or thread is None:
        return False
    thread.store = ShortPuts(thread.store)
    return True


class ShortPuts:
    """A store whose puts are split into calls of few transfers.

    Args:
        store: The store.
        clock: In seconds.
    """

    def __init__(self, store: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        config: Any,
    ) -> list[int]:
        """Write values from buffers; return 0 or an error code below 0 a key.

        Behind a transfer that failed after a long time the rest is not tried, and
        counts as failed in the same way: it would wait as long again.

        Source: as Mooncake's ``batch_put_from_multi_buffers``. Not split where the
        configuration names a group for each key.
        """
        put = self._store.batch_put_from_multi_buffers
        if getattr(config, "group_ids", None):
            return list(put(keys, addrs, sizes, config))
        results: list[int] = []
        for batch in batches([len(one) for one in addrs], MAX_TRANSFERS):
            start = self._clock()
            done = put(keys[batch], addrs[batch], sizes[batch], config)
            results += done
            if _TRANSFER_FAIL in done and self._clock() - start > _LONG_SECONDS:
                break
        return results + [_TRANSFER_FAIL] * (len(keys) - len(results))

# SPDX-License-Identifier: Apache-2.0
"""A store as a load thread sees it: values land first, and are copied when complete."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.junctions.repairs.batches import batches
from vllm.junctions.repairs.late_loads.kv_memory import Copier, KVMemory
from vllm.junctions.repairs.late_loads.landing import LandingMemory, Run

# Mooncake's error code for a transfer that failed, or was given up.
TRANSFER_FAIL = -800
# A failed call that took less has ended, not given up, each of its transfers: Mooncake
# 0.3.13 waits 60 s for them. So much less that a shorter wait would do as well; a
# peer that is gone fails calls within about a second.
_SURELY_OVER_SECONDS = 5.0

# Mooncake 0.3.13 queues 2,048 transfers to a peer, of all threads; what comes on top
# fails at once.
_MAX_KEYS = 128

# Kinds of fault.
SET_ASIDE = "set_aside_loads"
REFUSED = "refused_loads"


class LandingStore:
    """A store whose gets write into memory of this package first. For one thread.

    Args:
        store: The store; ``memory`` is registered with it.
        memory: Where values land; shared by threads.
        blocks: Where they go.
        report: Told the kind of a fault and what happened.
        clock: In seconds.
    """

    def __init__(
        self,
        store: Any,
        memory: LandingMemory,
        blocks: KVMemory,
        report: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._memory = memory
        self._copier = Copier(memory.memory, memory.address, blocks)
        self._report = report
        self._clock = clock
        self._run: Run | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read values into KV blocks; return bytes or an error code below 0 a key.

        When it returns, nothing writes into the blocks any more; those of a key that
        failed are untouched. Behind a transfer that failed the rest is not tried, and
        counts as failed in the same way.

        Source: as Mooncake's ``batch_get_into_multi_buffers``.

        Raises:
            LookupError: A buffer lies in no registered KV cache.
        """
        results: list[int] = []
        value_bytes = [sum(parts) for parts in sizes]
        for batch in batches(value_bytes, self._memory.run_bytes, _MAX_KEYS):
            results += self._load(
                keys[batch], addrs[batch], sizes[batch], value_bytes[batch]
            )
            if TRANSFER_FAIL in results:
                break
        return results + [TRANSFER_FAIL] * (len(keys) - len(results))

    def _load(
        self,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        value_bytes: Sequence[int],
    ) -> list[int]:
        run = self._take_run(sum(value_bytes))
        if run is None:
            return [TRANSFER_FAIL] * len(keys)
        offsets = [*itertools.accumulate(value_bytes, initial=run.offset)][:-1]
        places = [[self._memory.address + offset] for offset in offsets]
        start, is_over = self._clock(), False
        try:
            done = self._store.batch_get_into_multi_buffers(
                keys, places, [[size] for size in value_bytes]
            )
            seconds = self._clock() - start
            is_over = min(done) >= 0 or seconds < _SURELY_OVER_SECONDS
            return self._complete(done, value_bytes, offsets, addrs, sizes)
        finally:
            if not is_over:
                self._set_aside(run, keys)

    def _complete(
        self,
        done: Sequence[int],
        value_bytes: Sequence[int],
        offsets: Sequence[int],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy the values that are complete; return a result a key."""
        results = []
        for code, num_bytes, offset, value_addrs, value_sizes in zip(
            done, value_bytes, offsets, addrs, sizes, strict=True
        ):
            if code == num_bytes:
                self._copier.scatter(offset, value_addrs, value_sizes)
            elif code >= 0:
                # Of another size: not what the blocks wait for.
                code = TRANSFER_FAIL
            results.append(code)
        self._copier.synchronize()
        return results

    def _take_run(self, num_bytes: int) -> Run | None:
        """Return this thread's run, another if it is too short, None if all is used."""
        run = self._run
        if run is None or run.num_bytes < num_bytes:
            if run is not None:
                self._memory.give_back(run)
            self._run = run = self._memory.take(num_bytes)
        if run is None:
            self._report(REFUSED, "A load was refused: landing memory is used up.")
        return run

    def _set_aside(self, run: Run, keys: Sequence[str]) -> None:
        self._memory.set_aside(run)
        self._run = None
        self._report(
            SET_ASIDE,
            f"A load of {len(keys)} keys failed so late that its peer may still "
            "answer; what comes lands in memory that nobody uses any more.",
        )

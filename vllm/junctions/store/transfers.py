# SPDX-License-Identifier: Apache-2.0
"""Store calls of which no transfer is still under way when they return.

Mooncake's store client waits 60 s for the transfers of a call (0.3.13, compiled in).
Those that still queue for a peer then are given up, but not cancelled: they run once
the peer answers again, and write into, or read from, KV blocks that belong to another
request by now. A TCP transfer that makes no progress is dropped earlier, and makes room
for the next in the queue. So a call that asks for few transfers has seen the end of
each of them, as long as they fail soon enough; and one that was given up all the same
is not over before the queue is empty. What was dropped is tried once more: the peer may
have been slow for no longer than that.
"""

import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

# Mooncake's error code for a transfer that failed, or was given up.
TRANSFER_FAIL = -800
_GIVEN_UP_SECONDS = 60.0
# A call this long may have been given up; Mooncake's clock is not ours.
_LONG_SECONDS = 0.9 * _GIVEN_UP_SECONDS
# How long to wait for the queue of a peer that does not come back.
_MAX_SETTLE_SECONDS = 600.0

_LANES = "MC_TCP_LANES_PER_PEER"
_PATIENCE = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
# Mooncake's own, for values that it does not take either.
_MOONCAKE_LANES, _MOONCAKE_PATIENCE = 4, 30
_OUR_LANES, _OUR_PATIENCE = 16, 10
# Connections are made anew after each drop.
_OVERHEAD = 1.25
# Mooncake does not connect to a peer again for a second after it dropped a transfer.
_RECONNECT_SECONDS = 1.5
# For so long nothing is tried twice after something that failed twice: the peer is
# gone, and loads that wait for their turn should not wait for it as well.
_RETRY_PAUSE_SECONDS = 30.0


@dataclass(frozen=True)
class TransferLimits:
    """What Mooncake's TCP transport does with transfers to a peer that stands still.

    Attributes:
        lanes: Transfers that are under way to one peer at a time.
        patience_seconds: After which one that makes no progress is dropped.
    """

    lanes: int = _OUR_LANES
    patience_seconds: int = _OUR_PATIENCE

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> "TransferLimits":
        """Return the limits that the environment sets; set ours where it sets none.

        To be called before Mooncake reads the environment, which it does when a
        store is created.
        """
        environ.setdefault(_LANES, str(_OUR_LANES))
        for name in _PATIENCE:
            environ.setdefault(name, str(_OUR_PATIENCE))
        return cls(
            _positive(environ[_LANES], _MOONCAKE_LANES),
            max(_positive(environ[name], _MOONCAKE_PATIENCE) for name in _PATIENCE),
        )

    def max_transfers(self, num_threads: int) -> int:
        """Return how many transfers a call may make, with calls on so many threads.

        So few that a peer that stands still has dropped them all before any of the
        calls is given up; at least what the lanes take at once.
        """
        seconds = num_threads * self.patience_seconds * _OVERHEAD
        return self.lanes * max(int(_GIVEN_UP_SECONDS / seconds), 1)


def _positive(text: str, default: int) -> int:
    try:
        return max(int(text), 0) or default
    except ValueError:
        return default


class BoundedStore:
    """A store whose gets and puts are split into calls of few transfers.

    A value whose transfer failed is tried once more, unless another failed twice a
    short while ago. After a call in which a transfer failed for good, the rest is not
    tried, and counts as failed in the same way.

    Args:
        store: The store.
        max_transfers: Buffers of a call; a value of more makes a call by itself.
        patience_seconds: See :class:`TransferLimits`.
        clock: In seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        store: Any,
        max_transfers: int,
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._max_transfers = max_transfers
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._sleep = sleep
        self._no_retry_before = float("-inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read values into buffers; return bytes or an error code below 0 a key.

        When it returns, nothing writes into the buffers any more, unless a peer has
        stood still for ten minutes; then the log says so.

        Source: as Mooncake's ``batch_get_into_multi_buffers``.
        """
        get = self._store.batch_get_into_multi_buffers
        return self._in_parts(get, True, keys, addrs, sizes)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        config: Any,
    ) -> list[int]:
        """Write values from buffers; return 0 or an error code below 0 a key.

        Source: as Mooncake's ``batch_put_from_multi_buffers``. Not split where the
        configuration names a group for each key.
        """
        if getattr(config, "group_ids", None):
            whole: list[int] = self._store.batch_put_from_multi_buffers(
                keys, addrs, sizes, config
            )
            return whole

        def put(*part: Any) -> Sequence[int]:
            done: Sequence[int] = self._store.batch_put_from_multi_buffers(
                *part, config
            )
            return done

        return self._in_parts(put, False, keys, addrs, sizes)

    def _in_parts(
        self,
        call: Callable[..., Sequence[int]],
        settles: bool,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        results: list[int] = []
        for first, end in self._parts(addrs):
            part = slice(first, end)
            done = self._twice(call, settles, keys[part], addrs[part], sizes[part])
            results += done
            if TRANSFER_FAIL in done:
                break
        return results + [TRANSFER_FAIL] * (len(keys) - len(results))

    def _twice(
        self,
        call: Callable[..., Sequence[int]],
        settles: bool,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> Sequence[int]:
        """Make a call; make it again for what was dropped the first time."""
        done, given_up = self._once(call, settles, keys, addrs, sizes)
        failed = [index for index, code in enumerate(done) if code == TRANSFER_FAIL]
        if not failed or given_up or self._clock() < self._no_retry_before:
            return done
        self._sleep(_RECONNECT_SECONDS)
        again, _ = self._once(
            call,
            settles,
            [keys[index] for index in failed],
            [addrs[index] for index in failed],
            [sizes[index] for index in failed],
        )
        num_failed = list(again).count(TRANSFER_FAIL)
        if num_failed:
            self._no_retry_before = self._clock() + _RETRY_PAUSE_SECONDS
        logger.warning(
            "The store dropped %d transfers; tried again, %d of them came through.",
            len(failed),
            len(failed) - num_failed,
        )
        merged = dict(zip(failed, again, strict=True))
        return [merged.get(index, code) for index, code in enumerate(done)]

    def _once(
        self,
        call: Callable[..., Sequence[int]],
        settles: bool,
        keys: Sequence[str],
        addrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> tuple[Sequence[int], bool]:
        """Make a call; tell whether it was given up, and if it settles, wait then."""
        start = self._clock()
        done = call(keys, addrs, sizes)
        given_up = TRANSFER_FAIL in done and self._clock() - start >= _LONG_SECONDS
        if given_up and settles:
            values = zip(keys, addrs, sizes, done, strict=True)
            self._settle([value for *value, code in values if code == TRANSFER_FAIL])
        return done, given_up

    def _parts(self, addrs: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Yield first and end of runs of values with few buffers between them."""
        first = num_buffers = 0
        for index, buffers in enumerate(addrs):
            if index > first and num_buffers + len(buffers) > self._max_transfers:
                yield first, index
                first, num_buffers = index, 0
            num_buffers += len(buffers)
        if addrs:
            yield first, len(addrs)

    def _settle(self, failed: Sequence[Sequence[Any]]) -> None:
        """Wait until transfers that were given up are over.

        The queue of a peer is served in order: once another read of such a value
        has come through, those before it have, or are on another lane, where they
        are dropped in time.
        """
        logger.warning(
            "The store gave up %d reads that may still write into KV blocks; the "
            "blocks stay reserved until the peer has answered or dropped them.",
            len(failed),
        )
        start = self._clock()
        waiting = list(failed)
        while waiting and self._clock() - start < _MAX_SETTLE_SECONDS:
            key, addrs, sizes = waiting[0]
            (result,) = self._store.batch_get_into_multi_buffers(
                [key], [addrs], [sizes]
            )
            if result >= 0:
                break
            if result == TRANSFER_FAIL:
                self._sleep(1)
            else:
                # Gone: this one tells nothing of its peer any more.
                waiting.pop(0)
        if waiting and self._clock() - start >= _MAX_SETTLE_SECONDS:
            logger.error(
                "A peer of the store has not answered for %d s; restart this instance "
                "before that peer comes back, or its late answers may end up in KV "
                "blocks of other requests.",
                _MAX_SETTLE_SECONDS,
            )
            return
        self._sleep(self._patience_seconds * _OVERHEAD)

# SPDX-License-Identifier: Apache-2.0
"""How long the scheduler waits for lookup answers, and when it stops asking.

The stock client waits without a bound. Its request-reply socket takes no second
request before the answer to the first, and what reaches it late would be taken for
the answer to the next request: a lookup that is given up gives up its socket too.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

_FIRST_PAUSE_TIMEOUTS = 4
_LONGEST_PAUSE_SECONDS = 60.0
_WITHOUT_BOUND = -1


class Patience:
    """Pauses lookups behind a server that leaves them unanswered.

    After the first timeout no lookup is sent for four timeouts' time, after each
    further one for twice as long as before, up to a minute (or four timeouts, if
    that is longer). So a dead server costs the scheduler one fifth of its time at
    first and, with a timeout of 2 s, 3 % in the long run. An answer ends it.

    Args:
        timeout_seconds: How long one lookup may take.
        clock: Seconds that only grow.
    """

    def __init__(
        self, timeout_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._first_pause = _FIRST_PAUSE_TIMEOUTS * timeout_seconds
        self._longest_pause = max(self._first_pause, _LONGEST_PAUSE_SECONDS)
        self._pause = 0.0
        self._paused_until = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether lookups are not to be sent now."""
        return self._pause > 0 and self._clock() < self._paused_until

    def timed_out(self) -> None:
        """Note that a lookup was not answered in time."""
        doubled = 2 * self._pause or self._first_pause
        self._pause = min(doubled, self._longest_pause)
        self._paused_until = self._clock() + self._pause

    def answered(self) -> None:
        """Note that a lookup was answered."""
        self._pause = 0.0


@contextmanager
def bounded(socket: Any, timeout_ms: int) -> Iterator[None]:
    """Let sends and receives of a ZMQ socket raise ``zmq.Again`` after a while.

    Outside of the block the socket waits without a bound, as stock has it: a reset
    of the store takes as long as it takes.

    Args:
        socket: The socket.
        timeout_ms: Bound on one send and on one receive, in milliseconds.
    """
    options = (zmq.SNDTIMEO, zmq.RCVTIMEO)
    for option in options:
        socket.setsockopt(option, timeout_ms)
    try:
        yield
    finally:
        for option in options:
            socket.setsockopt(option, _WITHOUT_BOUND)

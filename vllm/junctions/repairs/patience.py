# SPDX-License-Identifier: Apache-2.0
"""When to ask again behind a server that left something unanswered."""

import time
from collections.abc import Callable

_FIRST_PAUSE_TIMEOUTS = 4
_LONGEST_PAUSE_SECONDS = 60.0


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

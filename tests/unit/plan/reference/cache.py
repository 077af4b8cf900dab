# SPDX-License-Identifier: Apache-2.0
"""A cache of blocks that forgets the least recently used first."""

from collections import deque

import numpy as np


class BlockCache:
    """Which of ``num_keys`` numbered blocks are cached.

    Attributes:
        num_blocks: How many are cached.
        num_evicted: How many had to go so far.
    """

    def __init__(self, num_keys: int, capacity_blocks: int | None = None) -> None:
        """Create an empty cache; None is no bound."""
        self.num_blocks = 0
        self.num_evicted = 0
        self._capacity = capacity_blocks
        self._clock = 0
        # When each block was last used; 0 for those that are not cached.
        self._used_at = np.zeros(num_keys, dtype=np.int32)
        # Uses in order. A block's entry counts only if no later use followed.
        self._uses: deque[tuple[int, np.ndarray]] = deque()

    def cached(self, keys: np.ndarray) -> np.ndarray:
        """Return a mask over ``keys``."""
        return self._used_at[keys] > 0

    def use(self, keys: np.ndarray) -> int:
        """Cache ``keys``, or mark them as used just now; return how many are new.

        Where not all of them can stay, the last ones go first. Keys are distinct.
        """
        num_new = len(keys) - int(np.count_nonzero(self._used_at[keys]))
        if self._capacity is None:
            self._used_at[keys] = 1
            self.num_blocks += num_new
            return num_new
        self._clock += 1
        self._used_at[keys] = self._clock
        self._uses.append((self._clock, keys))
        self.num_blocks += num_new
        self._evict()
        return num_new

    def _evict(self) -> None:
        assert self._capacity is not None
        while self.num_blocks > self._capacity:
            used_at, keys = self._uses.popleft()
            oldest = np.flatnonzero(self._used_at[keys] == used_at)
            num_gone = min(len(oldest), self.num_blocks - self._capacity)
            split = len(oldest) - num_gone
            if split:
                self._uses.appendleft((used_at, keys[oldest[:split]]))
            self._used_at[keys[oldest[split:]]] = 0
            self.num_blocks -= num_gone
            self.num_evicted += num_gone

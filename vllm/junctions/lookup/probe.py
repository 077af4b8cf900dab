# SPDX-License-Identifier: Apache-2.0
"""A store as one lookup sees it: what it is asked, and whether it could answer.

A client that has lost its master does not raise: it answers every key with an error
code below 0, which the stock lookup reads as "not there".
"""

from collections.abc import Sequence
from typing import Any


class StoreProbe:
    """Passes everything on to a store, and notes existence checks.

    Attributes:
        num_keys: Keys asked for.
        num_rpcs: Calls.
        error: What the store answered in place of yes or no; None if nothing.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.num_keys = 0
        self.num_rpcs = 0
        self.error: str | None = None

    def batch_is_exist(self, keys: Sequence[str]) -> Sequence[int]:
        """Return 1 for each key that exists, 0 for others, below 0 for errors."""
        self.num_keys += len(keys)
        self.num_rpcs += 1
        try:
            answers: Sequence[int] = self._store.batch_is_exist(keys)
        except Exception as error:
            self.error = repr(error)
            raise
        if answers and (worst := min(answers)) < 0:
            self.error = f"error code {worst} for {len(keys)} keys"
        return answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

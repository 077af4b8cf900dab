# SPDX-License-Identifier: Apache-2.0
"""From a place in a prompt's text to a position in its tokens.

The text up to a mark is tokenised by itself. As many of its tokens as the whole prompt
has too are the mark's position: where a token of the prompt reaches across the mark,
the position is the last one before it. Nothing in this module knows about vLLM's
objects.
"""

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.junctions.rules.declared import MAX_DECLARED

_MAX_REMEMBERED = 1024


def num_common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two lists begin with alike: (1, 2, 3), (1, 2, 4): 2."""
    low, high = 0, min(len(one), len(other))
    # Slices compare at the speed of C, single tokens do not.
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def with_marks(explicit: Any, positions: Iterable[int]) -> list[int] | None:
    """Return a client's positions and those of its marks, ascending, at most four.

    The explicit ones all stay; of the others the last ones have the room that is left.
    ``[100]`` with marks at 40, 50, 60 and 70 gives ``[50, 60, 70, 100]``.

    Args:
        explicit: What the client sent as positions; None for nothing.
        positions: Token positions of its marks.

    Returns:
        None where the explicit positions are no ascending list of integers: they are
        left to whoever says what is wrong with them.
    """
    given = [] if explicit is None else explicit
    if not isinstance(given, list) or any(type(entry) is not int for entry in given):
        return None
    if any(one >= next_ for one, next_ in itertools.pairwise(given)):
        return None
    room = max(MAX_DECLARED - len(given), 0)
    added = sorted(set(positions) - set(given))
    return sorted(given + added[len(added) - min(room, len(added)) :])


class KnownPositions:
    """Remembers positions of texts: what many requests share is tokenised once.

    Bounded, and safe to use from several threads.
    """

    def __init__(self, max_entries: int = _MAX_REMEMBERED) -> None:
        self._max_entries = max_entries
        # Number of tokens and their hash, by digest of the text that they stand for.
        self._known: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str, prompt_token_ids: Sequence[int]) -> int | None:
        """Return the position of a text in a prompt; None where it is not known.

        Args:
            text: What the prompt's text begins with.
            prompt_token_ids: The prompt's tokens.
        """
        key = _digest(text)
        with self._lock:
            known = self._known.get(key)
            if known is None:
                return None
            self._known.move_to_end(key)
        num_tokens, tokens_hash = known
        # Another prompt can have cut the same text into other tokens.
        if hash(tuple(prompt_token_ids[:num_tokens])) != tokens_hash:
            return None
        return num_tokens

    def add(self, text: str, prompt_token_ids: Sequence[int], num_tokens: int) -> None:
        """Remember that a text is the first ``num_tokens`` tokens of a prompt."""
        key = _digest(text)
        value = num_tokens, hash(tuple(prompt_token_ids[:num_tokens]))
        with self._lock:
            self._known[key] = value
            self._known.move_to_end(key)
            if len(self._known) > self._max_entries:
                self._known.popitem(last=False)


def _digest(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()

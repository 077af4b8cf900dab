# SPDX-License-Identifier: Apache-2.0
"""Prompts as units: numbers that are the same where prompts are the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

_SEED = 20_240_601
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Prompt:
    """A request's prompt.

    Attributes:
        num_tokens: Its length.
        ids: Of its whole units; the same number means the same prompt up to there.
        conversation: The same for prompts that begin with the same block.
        instance: Who served it, where that is known.
        looked_up_ms: When its prefix was looked up.
        stored_ms: When what it computed was there for others.
    """

    num_tokens: int
    ids: np.ndarray
    conversation: int = 0
    instance: int | None = None
    looked_up_ms: float = 0.0
    stored_ms: float = 0.0


class Units:
    """Makes units of a trace's hash ids.

    A trace numbers blocks of its own length; a unit is what a layout can tell apart.
    Blocks of 512 tokens become eight units of 64, blocks of 16 become a quarter each.
    A block counts as the same as another where it follows the same blocks and has the
    same id and length, so ids need not be chained.

    Args:
        block_tokens: Tokens per hash id.
        unit_tokens: Tokens per unit.
    """

    def __init__(self, block_tokens: int, unit_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.unit_tokens = unit_tokens
        self._piece_tokens = gcd(block_tokens, unit_tokens)
        self._pieces_per_block = block_tokens // self._piece_tokens
        self._pieces_per_unit = unit_tokens // self._piece_tokens
        self._random = np.random.default_rng(_SEED)
        self._weights = self._odd(1 << 10)
        self._rest_weight, piece_weight = self._odd(2)[:, None]
        steps = np.arange(1, self._pieces_per_block + 1, dtype=np.uint64)
        self._steps = steps * piece_weight

    def _odd(self, count: int) -> np.ndarray:
        drawn = self._random.integers(0, 1 << 64, count, dtype=np.uint64)
        return drawn | np.uint64(1)

    def of(self, hash_ids: Sequence[int], num_tokens: int) -> np.ndarray:
        """Return a prompt's whole units.

        Args:
            hash_ids: One a block, the last one for the rest.
            num_tokens: The prompt's length.
        """
        blocks = self._chained(hash_ids, num_tokens)
        if self._pieces_per_block > 1:
            blocks = (blocks[:, None] + self._steps).ravel()
        first = self._pieces_per_unit - 1
        whole = num_tokens // self._piece_tokens
        return blocks[:whole][first :: self._pieces_per_unit]

    def _chained(self, hash_ids: Sequence[int], num_tokens: int) -> np.ndarray:
        """Return numbers that tell blocks apart by all that is before them too."""
        try:
            ids = np.array(hash_ids, dtype=np.uint64)
        except OverflowError:
            ids = np.array([hash(one) & _MASK for one in hash_ids], dtype=np.uint64)
        if len(ids) > len(self._weights):
            more = self._odd(2 * len(ids) - len(self._weights))
            self._weights = np.concatenate([self._weights, more])
        # Zero must count, and neighbours must not look alike.
        ids = (ids + np.uint64(1)) * self._weights[: len(ids)]
        rest = num_tokens % self.block_tokens
        if rest:
            ids[-1:] += np.uint64(rest) * self._rest_weight
        return ids.cumsum()


class ContinuedUnits:
    """Units of a trace whose prompts are taken to go on where earlier ones ended.

    A trace does not say how far two different blocks agree. Here a prompt that goes on
    where the last whole block of an earlier one ends, and further, is taken to begin
    with all that the earlier one had in its last block, as the next turn of a
    conversation does. Takes memory for every block of the trace.

    Args: See :class:`Units`; units have to divide blocks.
    """

    def __init__(self, block_tokens: int, unit_tokens: int) -> None:
        if block_tokens % unit_tokens:
            raise ValueError(
                f"--assume-continued needs blocks of a multiple of {unit_tokens} "
                f"tokens; the trace's have {block_tokens}."
            )
        self.block_tokens = block_tokens
        self.unit_tokens = unit_tokens
        self._units_per_block = block_tokens // unit_tokens
        self._units_by_block: list[np.ndarray] = []
        self._numbers: dict[tuple[int, int, int], int] = {}
        # By the block that it follows: the latest block that was not whole.
        self._last_parts: dict[int, tuple[int, int]] = {}

    def of(self, hash_ids: Sequence[int], num_tokens: int) -> np.ndarray:
        """Return a prompt's whole units; see :meth:`Units.of`."""
        parent, found = -1, []
        for index, hash_id in enumerate(hash_ids):
            rest = num_tokens - index * self.block_tokens
            num_own = min(rest, self.block_tokens)
            key = (parent, hash_id, num_own)
            if key not in self._numbers:
                self._numbers[key] = self._add(parent, num_own)
            if num_own < self.block_tokens:
                self._last_parts[parent] = (self._numbers[key], num_own)
            parent = self._numbers[key]
            found.append(self._units_by_block[parent])
        return np.concatenate(found)[: num_tokens // self.unit_tokens]

    def _add(self, parent: int, num_tokens: int) -> int:
        number = len(self._units_by_block)
        first = number * self._units_per_block
        units = np.arange(first, first + self._units_per_block, dtype=np.uint64)
        earlier, num_shared_tokens = self._last_parts.get(parent, (-1, 0))
        if parent >= 0 and 0 < num_shared_tokens <= num_tokens:
            num_shared = num_shared_tokens // self.unit_tokens
            units[:num_shared] = self._units_by_block[earlier][:num_shared]
        self._units_by_block.append(units)
        return number

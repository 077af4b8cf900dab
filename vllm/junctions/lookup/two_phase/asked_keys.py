# SPDX-License-Identifier: Apache-2.0
"""The keys that one store lookup may ask for, and what the store answered."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHash

from vllm.junctions.lookup.two_phase.plan import Tail

# Says for each key whether the store holds it (1) or not.
Ask = Callable[[list[str]], Sequence[int]]

# What is known of one block of one group: nothing; that the first of several rank
# namespaces has it; that one has not; that all have; that it is being asked for.
UNKNOWN, FIRST, ABSENT, PRESENT, ASKED = range(5)


class Wanted(NamedTuple):
    """Blocks of one group to ask for.

    Attributes:
        group_id: The KV-cache group.
        units: The hash units that the blocks end with, from 0.
        all_ranks: Whether to ask in all rank namespaces, or in the first only.
    """

    group_id: int
    units: Sequence[int]
    all_ranks: bool = True


class AskedKeys:
    """Asks for keys; by group and hash unit, whether the store has them.

    Attributes:
        states: For each group one byte a hash unit.
        num_units: Hash units that the lookup asks for at most.

    Args:
        key_stems: For each group, what keys begin with, one a rank namespace.
        block_hashes: One per hash unit; read only for keys that are asked for.
        ask: The call to the store.
    """

    def __init__(
        self,
        key_stems: Sequence[Sequence[str]],
        block_hashes: Sequence[BlockHash],
        ask: Ask,
    ) -> None:
        self.num_units = len(block_hashes)
        self.states = [bytearray(self.num_units) for _ in key_stems]
        self._key_stems = key_stems
        self._block_hashes = block_hashes
        self._ask_store = ask
        self._state_arrays = [np.frombuffer(one, np.uint8) for one in self.states]
        self._names: dict[int, str] = {}

    def ask(self, *wanted: Wanted) -> None:
        """Ask the store for those blocks that are not known yet, in one call."""
        keys: list[str] = []
        asked: list[tuple[bytearray, list[int], int, int]] = []
        for group_id, units, all_ranks in wanted:
            states = self.states[group_id]
            stems = self._key_stems[group_id]
            # Where the first rank's answer is known, the others' are asked for.
            for state in (UNKNOWN, FIRST) if all_ranks else (UNKNOWN,):
                open_units = [unit for unit in units if states[unit] == state]
                if not open_units:
                    continue
                part = stems[state:] if all_ranks else stems[:1]
                done = PRESENT if all_ranks or len(stems) == 1 else FIRST
                names = self._names_of(open_units)
                for stem in part:
                    keys += [stem + name for name in names]
                for unit in open_units:
                    states[unit] = ASKED
                asked.append((states, open_units, len(part), done))
        if keys:
            self._learn(asked, self._ask_store(keys))

    def _learn(
        self,
        asked: list[tuple[bytearray, list[int], int, int]],
        answers: Sequence[int],
    ) -> None:
        start = 0
        for states, units, num_ranks, done in asked:
            for _ in range(num_ranks):
                end = start + len(units)
                for unit, answer in zip(units, answers[start:end], strict=True):
                    if answer != 1:
                        states[unit] = ABSENT
                    elif states[unit] == ASKED:
                        states[unit] = done
                start = end

    def _names_of(self, units: list[int]) -> list[str]:
        names, block_hashes = self._names, self._block_hashes
        for unit in units:
            if unit not in names:
                names[unit] = block_hashes[unit].hex()
        return [names[unit] for unit in units]

    def windows(self, tail: Tail, first: int, end: int) -> list[bytearray]:
        """Return what is known of some blocks, for each of the groups."""
        units = tail.units_per_block
        units_slice = slice(first * units + units - 1, end * units, units)
        return [self.states[group_id][units_slice] for group_id in tail.group_ids]

    def rows(
        self, tail: Tail, first: int, length: int, step: int, count: int
    ) -> list[np.ndarray]:
        """Return what is known of windows at equal distances, a row each, downwards.

        Blocks before the first and past the last count as neither there nor absent.
        """
        units = tail.units_per_block
        rows = (first + 1) * units - 1 - np.arange(count)[:, None] * (step * units)
        index = rows + np.arange(length) * units
        outside = (index < 0) | (index >= self.num_units)
        index[outside] = 0
        found = []
        for group_id in tail.group_ids:
            states = self._state_arrays[group_id][index]
            states[outside] = ASKED
            found.append(states)
        return found


def has(known: list[np.ndarray], *states: int) -> np.ndarray:
    """Return for each row whether any group has any of the states there."""
    found = np.zeros(len(known[0]), bool)
    for one in known:
        for state in states:
            found |= (one == state).any(axis=1)
    return found

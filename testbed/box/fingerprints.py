# SPDX-License-Identifier: Apache-2.0
"""What KV must hold: numbers that stand for (group, prefix that ends there).

A prefix's number is a digest chained over its hash units. A page of KV memory has
one slot of eight bytes per unit. The chain is made here from the tokens, apart from
vLLM's block hashes; :class:`FingerprintBook` learns which block hash stands for
which prefix.

One thing of reality is left out: what a drafter's layers keep for a token depends on
the next token too, which a block hash does not cover. vLLM itself accepts that.
"""

from hashlib import blake2b

import numpy as np

from testbed.box.layout import Layout

SLOT_BYTES = 8
_MASK = (1 << 64) - 1
_GROUP_STEP = 0x9E3779B97F4A7C15


def _digest(previous: int, tokens: list[int]) -> int:
    data = previous.to_bytes(8, "big") + np.asarray(tokens, dtype=np.int64).tobytes()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


class Sequence:
    """The tokens of a request, and the number of every prefix of them.

    Args:
        tokens: Its token ids; those of an image as whatever tells images apart.
        hash_tokens: Tokens per hash unit.
        origin: What else its KV depends on, such as an adapter; no other sequence
            with another origin shares a prefix with it.
    """

    def __init__(self, tokens: list[int], hash_tokens: int, origin: int = 0) -> None:
        self.hash_tokens = hash_tokens
        self.origin = origin
        self.tokens: list[int] = []
        self._chain: list[int] = []
        self._chain_array = np.zeros(0, dtype=np.uint64)
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
        unit = self.hash_tokens
        for index in range(len(self._chain), len(self.tokens) // unit):
            previous = self._chain[-1] if self._chain else self.origin
            self._chain.append(
                _digest(previous, self.tokens[index * unit : (index + 1) * unit])
            )
        self._chain_array = np.asarray(self._chain, dtype=np.uint64)

    def prefix_number(self, num_tokens: int) -> int:
        """Return the number of the prefix of ``num_tokens`` tokens; 0 if empty."""
        units, rest = divmod(num_tokens, self.hash_tokens)
        number = self._chain[units - 1] if units else self.origin
        return (
            _digest(number, self.tokens[num_tokens - rest : num_tokens])
            if (rest)
            else number
        )

    def next_sample(self) -> int:
        """Return the token that the fake model samples after all tokens."""
        return 1_000 + self.prefix_number(len(self.tokens)) % 30_000

    def units(self, group_id: int, first: int, end: int) -> np.ndarray:
        """Return what the slots of units ``first`` to ``end - 1`` hold."""
        return self._chain_array[first:end] ^ group_number(group_id)

    def state(self, group_id: int, num_tokens: int) -> np.uint64:
        """Return the number of a recurrent state after ``num_tokens`` tokens."""
        return np.uint64(self.prefix_number(num_tokens)) ^ group_number(group_id)


def group_number(group_id: int) -> np.uint64:
    return np.uint64((group_id + 1) * _GROUP_STEP & _MASK)


class FingerprintBook:
    """Says what the store's value under a key must be."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._prefix_by_hash: dict[str, tuple[Sequence, int]] = {}

    def learn(self, sequence: Sequence, block_hashes: list[bytes]) -> None:
        """Note which prefix each block hash of a request stands for."""
        for unit in range(len(block_hashes) - 1, -1, -1):
            name = bytes(block_hashes[unit]).hex()
            if name in self._prefix_by_hash:
                return
            self._prefix_by_hash[name] = (sequence, unit)

    def prefix_tokens(self, key: str) -> int:
        """Return the length of the prefix that a store key names, in tokens."""
        _, unit = self._prefix_by_hash[key.rpartition("@")[2]]
        return (unit + 1) * self._layout.hash_tokens

    def fault(self, key: str, value: bytes) -> str | None:
        """Return what is wrong with the value under a key, None if nothing is."""
        group_id, name = parse_key(key)
        if name not in self._prefix_by_hash:
            return f"group {group_id}: key of an unknown prefix {name[:12]}"
        sequence, unit = self._prefix_by_hash[name]
        group = self._layout.groups[group_id]
        slots = np.frombuffer(value, dtype=np.uint64)
        prefix_tokens = (unit + 1) * self._layout.hash_tokens
        if group.kind == "mamba":
            good = slots[0] == sequence.state(group_id, prefix_tokens)
            return None if good else f"group {group_id}: wrong state at {prefix_tokens}"
        units_per_block = group.block_tokens // self._layout.hash_tokens
        position = unit % units_per_block
        first = unit - position
        wanted = sequence.units(group_id, first, unit + 1)
        wrong = np.flatnonzero(slots[: position + 1] != wanted)
        if not len(wrong):
            return None
        at = (first + int(wrong[0]) + 1) * self._layout.hash_tokens
        return f"group {group_id}: value of prefix {prefix_tokens} is wrong at {at}"


def parse_key(key: str) -> tuple[int, str]:
    """Return ``(group id, block hash in hexadecimal)`` of a store key."""
    head, _, name = key.rpartition("@")
    return int(head.rpartition("@group:")[2]), name

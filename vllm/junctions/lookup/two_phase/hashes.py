# SPDX-License-Identifier: Apache-2.0
"""The block hashes of one request, and where in the request each of them is."""

from collections.abc import Iterator, Sequence
from typing import overload

from vllm.v1.core.kv_cache_utils import BlockHash


class LocatedHashes(Sequence[BlockHash]):
    """Block hashes that are read one by one, and can be located once read.

    vLLM's search reads hashes from the request and hands them to the pool, which
    knows its keys by hash unit. A long request has tens of thousands of hashes, of
    which a search reads a few; so units are noted as hashes are read.

    Attributes:
        units: The number of its hash unit, from 0, of each hash that was read.

    Args:
        block_hashes: One per hash unit.
        num_units: How many of them there are to the search.
    """

    def __init__(self, block_hashes: Sequence[BlockHash], num_units: int) -> None:
        self._block_hashes = block_hashes
        self._num_units = num_units
        self._read: dict[int, BlockHash] = {}
        self.units: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return self._num_units

    def __iter__(self) -> Iterator[BlockHash]:
        read = self._read
        for unit in range(self._num_units):
            yield read.get(unit) or self[unit]

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [self[unit] for unit in range(*index.indices(self._num_units))]
        found = self._read.get(index)
        if found is None:
            if not 0 <= index < self._num_units:
                raise IndexError(index)
            found = BlockHash(bytes(self._block_hashes[index]))
            self._read[index] = found
            self.units[found] = index
        return found

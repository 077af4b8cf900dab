# SPDX-License-Identifier: Apache-2.0
"""KV caches by address: what is copied to an address finds the tensor that is there."""

import ctypes
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Unlike ``ctypes.memmove`` it keeps the interpreter's lock: to get that back after
# each of thousands of small copies would take longer than they do.
_memmove = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


@dataclass(frozen=True)
class Region:
    """The storage of a KV cache tensor.

    Attributes:
        start: Its first address.
        end: The address behind it.
        flat: Its bytes, on a device; None if the host can write to the addresses.
    """

    start: int
    end: int
    flat: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Region":
        """Return the region of a tensor, with all that shares its storage."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        flat = None
        if tensor.device.type != "cpu":
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            flat.set_(storage)
        return cls(start, start + storage.nbytes(), flat)


class KVMemory:
    """Where loads go: KV caches, on the host or on devices.

    Args:
        regions: Their memory, in any order; the same more than once does no harm.
    """

    def __init__(self, regions: Iterable[Region]) -> None:
        by_start = {region.start: region for region in regions}
        self._regions = [by_start[start] for start in sorted(by_start)]
        self._starts = np.array([one.start for one in self._regions], np.int64)
        self._ends = np.array([one.end for one in self._regions], np.int64)
        self._is_host = all(region.flat is None for region in self._regions)

    @classmethod
    def of(cls, kv_caches: Mapping[str, Any]) -> "KVMemory":
        """Return the memory of KV caches.

        Args:
            kv_caches: A tensor or a list of tensors a layer, as vLLM's
                ``register_kv_caches`` gets them.
        """
        caches = kv_caches.values()
        tensors = [[one] if isinstance(one, torch.Tensor) else one for one in caches]
        return cls(Region.of(tensor) for group in tensors for tensor in group)

    def regions_of(
        self, addrs: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[Region] | None:
        """Return the region that each buffer lies in; None: all on the host.

        Raises:
            LookupError: A buffer lies in no registered KV cache.
        """
        starts = np.asarray(addrs, np.int64)
        found = np.searchsorted(self._starts, starts, "right") - 1
        inside = (found >= 0) & (starts + np.asarray(sizes) <= self._ends[found])
        if not inside.all():
            index = int(inside.argmin())
            raise LookupError(
                f"{sizes[index]} bytes at {addrs[index]:#x} lie in no registered KV "
                "cache"
            )
        if self._is_host:
            return None
        return [self._regions[index] for index in found.tolist()]


class Copier:
    """Copies values from landing memory into KV caches. For one thread.

    Args:
        source: Host memory.
        source_address: Where it begins.
        blocks: Where values go.
    """

    def __init__(
        self, source: mmap.mmap, source_address: int, blocks: KVMemory
    ) -> None:
        self._source = source
        self._source_address = source_address
        self._blocks = blocks
        self._streams: dict[torch.device, torch.Stream] = {}

    def scatter(self, offset: int, addrs: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy the bytes from an offset of the source on into buffers.

        On a device they are there after :meth:`synchronize`.

        Raises:
            LookupError: See :meth:`KVMemory.regions_of`.
        """
        regions = self._blocks.regions_of(addrs, sizes)
        if regions is None:
            source = self._source_address + offset
            for address, num_bytes in zip(addrs, sizes, strict=True):
                _memmove(address, source, num_bytes)
                source += num_bytes
            return
        for region, address, num_bytes in zip(regions, addrs, sizes, strict=True):
            if region.flat is None:
                _memmove(address, self._source_address + offset, num_bytes)
            else:
                first = address - region.start
                self._copy_to_device(offset, region.flat[first : first + num_bytes])
            offset += num_bytes

    def _copy_to_device(self, offset: int, part: torch.Tensor) -> None:
        if not len(part):
            return
        # A stream of its own: as with stock's reads, no computation is waited for.
        stream = self._streams.get(part.device)
        if stream is None:
            stream = self._streams[part.device] = _stream(part.device)
        landed = torch.frombuffer(
            self._source, dtype=torch.uint8, count=len(part), offset=offset
        )
        with stream:
            part.copy_(landed, non_blocking=True)

    def synchronize(self) -> None:
        """Wait until what was copied to devices is there."""
        for stream in self._streams.values():
            stream.synchronize()

# SPDX-License-Identifier: Apache-2.0
"""An in-memory store with the calls that the Mooncake worker makes.

Bytes are really copied from and to the addresses given, and only within memory
that was registered. Saves and loads can be held back, keys can be lost, gets and
puts can be made to fail. Status codes are those of Mooncake 0.3.13.
"""

import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NOT_FOUND = -704
_WRITE_FAILED = -702
_NO_ROOM = -200
_VALUE_TOO_LONG = -600
_VALUE_TOO_SHORT = -800


class Gate:
    """Lets calls through, or holds them until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def passed(self) -> None:
        """Wait until the gate is open."""
        if not self._open.wait(timeout=60):
            raise TimeoutError("A held call of the store was never released")


class MemoryStore:
    """What all instances share.

    Attributes:
        values: Stored bytes by key.
        puts: ``(client name, key)`` of every value stored, in order.
        fails_put: Says of a key whether storing it fails.
        fails_get: Says of a key whether reading it fails, although it is there.
        capacity_bytes: Bytes that it has room for; None for no bound.
        checks_sizes: Whether a value of another size than the buffers is refused,
            as the real store does.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.puts: list[tuple[str, str]] = []
        self.num_lookup_keys = 0
        self._failing_gets: dict[int, int] = {}
        self.fails_put: Callable[[str], bool] = lambda _key: False
        self.fails_get: Callable[[str], bool] = lambda _key: False
        self.capacity_bytes: int | None = None
        self.checks_sizes = True

    def has_room(self, num_bytes: int) -> bool:
        if self.capacity_bytes is None:
            return True
        used = sum(len(value) for value in self.values.values())
        return used + num_bytes <= self.capacity_bytes

    def evict(self, wanted: Callable[[str], bool]) -> list[str]:
        """Lose the keys that are wanted gone; return them."""
        lost = [key for key in self.values if wanted(key)]
        for key in lost:
            del self.values[key]
        return lost

    def fail_gets(self, group_id: int, count: int) -> None:
        """Let the next ``count`` reads of a group's keys fail."""
        self._failing_gets[group_id] = count

    def get_fails(self, key: str) -> bool:
        group_id = int(key.rpartition("@group:")[2].partition("@")[0])
        left = self._failing_gets.get(group_id, 0)
        self._failing_gets[group_id] = max(left - 1, 0)
        return left > 0 or self.fails_get(key)

    def client(self, name: str) -> "MemoryStoreClient":
        return MemoryStoreClient(self, name)


class MemoryStoreClient:
    """One instance's connection, in place of ``MooncakeDistributedStore``."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store = store
        self._name = name
        self._regions: list[tuple[int, int]] = []
        self.saves = Gate()
        self.loads = Gate()

    def setup(self, *_args: Any, **_kwargs: Any) -> int:
        return 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        self._regions.append((address, address + num_bytes))
        return 0

    def unregister_buffer(self, _address: int) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self._store.num_lookup_keys += len(keys)
        return [int(key in self._store.values) for key in keys]

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        addresses: list[list[int]],
        sizes: list[list[int]],
        _config: Any = None,
    ) -> list[int]:
        self.saves.passed()
        return [
            self._put(key, parts, lengths)
            for key, parts, lengths in zip(keys, addresses, sizes, strict=True)
        ]

    def _put(self, key: str, parts: list[int], lengths: list[int]) -> int:
        if self._store.fails_put(key):
            return _WRITE_FAILED
        # The first value stays, as in the real store.
        if key not in self._store.values:
            if not self._store.has_room(sum(lengths)):
                return _NO_ROOM
            self._store.values[key] = b"".join(
                ctypes.string_at(self._checked(address, length), length)
                for address, length in zip(parts, lengths, strict=True)
            )
            self._store.puts.append((self._name, key))
        return 0

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self.loads.passed()
        return [
            self._get_into(key, parts, lengths)
            for key, parts, lengths in zip(keys, addresses, sizes, strict=True)
        ]

    def _get_into(self, key: str, parts: list[int], lengths: list[int]) -> int:
        value = self._store.values.get(key)
        if value is None or self._store.get_fails(key):
            return _NOT_FOUND
        if self._store.checks_sizes and len(value) != sum(lengths):
            short = len(value) < sum(lengths)
            return _VALUE_TOO_SHORT if short else _VALUE_TOO_LONG
        offset = 0
        for address, length in zip(parts, lengths, strict=True):
            part = value[offset : offset + length]
            ctypes.memmove(self._checked(address, length), part, len(part))
            offset += length
        return len(value)

    def _checked(self, address: int, num_bytes: int) -> int:
        for start, end in self._regions:
            if start <= address and address + num_bytes <= end:
                return address
        raise ValueError(f"{num_bytes} bytes at {address:#x} are not registered")

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        return {key: [] for key in keys}

    def remove_all(self, force: bool = False) -> int:
        num_removed = len(self._store.values)
        self._store.values.clear()
        return num_removed

    def close(self) -> None:
        self.saves.release()
        self.loads.release()


class _ReplicateConfig:
    """The settings of a put; the stand-in heeds none of them."""


@contextmanager
def in_place_of_mooncake(client: MemoryStoreClient) -> Iterator[None]:
    """Hand ``client`` to whoever creates a ``MooncakeDistributedStore`` meanwhile."""
    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = lambda: client  # type: ignore[attr-defined]
    module.ReplicateConfig = _ReplicateConfig  # type: ignore[attr-defined]
    original = sys.modules.get("mooncake.store")
    sys.modules["mooncake.store"] = module
    try:
        yield
    finally:
        if original is None:
            del sys.modules["mooncake.store"]
        else:
            sys.modules["mooncake.store"] = original

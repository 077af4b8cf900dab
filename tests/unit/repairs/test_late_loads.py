# SPDX-License-Identifier: Apache-2.0
"""What a load that was given up still writes, it writes where nobody reads."""

import ctypes
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from vllm.junctions.repairs.late_loads import kv_memory, land_loads, landing
from vllm.junctions.repairs.late_loads.kv_memory import KVMemory
from vllm.junctions.repairs.late_loads.landing import LandingMemory, Unavailable
from vllm.junctions.repairs.late_loads.store import (
    REFUSED,
    SET_ASIDE,
    TRANSFER_FAIL,
    LandingStore,
)

GONE = -704
LEASE_EXPIRED = -707
PAGE = 4096
RUN = 4 * PAGE
BUFFER = 512


class Store:
    """Writes ``byte`` wherever it is told to; then answers from a script.

    The script has ``(seconds, results)`` by call; without one all goes well. What was
    asked for can be written again later, as Mooncake does with what it gave up.
    """

    def __init__(self, *script: tuple[float, list[int]]) -> None:
        self.now = 0.0
        self.byte = 1
        self.calls: list[list[str]] = []
        self.places: list[list[tuple[int, int]]] = []
        self.script = list(script)

    def register_buffer(self, address: int, num_bytes: int) -> int:
        return 0

    def batch_get_into_multi_buffers(self, keys, addrs, sizes):
        self.calls.append(keys)
        self.places.append(
            [
                buffer
                for value in zip(addrs, sizes, strict=True)
                for buffer in zip(*value, strict=True)
            ]
        )
        self.write(len(self.calls) - 1)
        if not self.script:
            return [sum(one) for one in sizes]
        seconds, results = self.script.pop(0)
        self.now += seconds
        if not results:
            raise RuntimeError("lost")
        return results

    def write(self, call: int) -> None:
        for address, num_bytes in self.places[call]:
            ctypes.memset(address, self.byte, num_bytes)


class Load:
    """A load thread's store, with KV caches of two layers and 16 blocks."""

    def __init__(self, *script, reserved_bytes: int = 4 * RUN) -> None:
        self.store = Store(*script)
        self.caches = [torch.zeros(16, BUFFER, dtype=torch.uint8) for _ in range(2)]
        self.memory = LandingMemory(reserved_bytes, RUN)
        self.faults: list[str] = []
        self.landed = self.thread()

    def thread(self) -> LandingStore:
        return LandingStore(
            self.store,
            self.memory,
            KVMemory.of(dict(enumerate(self.caches))),  # type: ignore[arg-type]
            lambda kind, _message: self.faults.append(kind),
            clock=lambda: self.store.now,
        )

    def get(self, *blocks: int) -> list[int]:
        keys = [f"k{block}" for block in blocks]
        addrs = [[cache[block].data_ptr() for cache in self.caches] for block in blocks]
        sizes = [[BUFFER, BUFFER]] * len(blocks)
        return self.landed.batch_get_into_multi_buffers(keys, addrs, sizes)

    def blocks(self) -> list[list[int]]:
        """Return which blocks of each layer hold something, and that it is whole."""
        for cache in self.caches:
            assert all(len(block.unique()) == 1 for block in cache)
        return [
            [index for index, block in enumerate(cache) if block[0]]
            for cache in self.caches
        ]


VALUE = 2 * BUFFER


def test_values_reach_their_blocks_in_one_transfer_a_key():
    load = Load()
    assert load.get(3, 5) == [VALUE, VALUE]
    assert load.blocks() == [[3, 5], [3, 5]]
    assert [size for _, size in load.store.places[0]] == [VALUE, VALUE]


def test_the_parts_of_a_value_go_to_their_own_buffers():
    load = Load()
    write = load.store.write

    def in_order(call: int) -> None:
        write(call)
        (address, _), *_ = load.store.places[call]
        ctypes.memset(address, 7, BUFFER)
        ctypes.memset(address + BUFFER, 9, BUFFER)

    load.store.write = in_order  # type: ignore[method-assign]
    load.get(3)
    assert [int(cache[3][0]) for cache in load.caches] == [7, 9]
    assert load.blocks() == [[3], [3]]


def test_nothing_of_a_key_that_failed_reaches_its_block():
    load = Load((0, [VALUE, TRANSFER_FAIL, GONE]))
    assert load.get(1, 2, 3) == [VALUE, TRANSFER_FAIL, GONE]
    assert load.blocks() == [[1], [1]]


@pytest.mark.parametrize("size", [0, VALUE - 1, VALUE + 1])
def test_a_value_of_another_size_fails_as_in_mooncake(size):
    load = Load((0, [size]))
    assert load.get(1) == [TRANSFER_FAIL]
    assert load.blocks() == [[], []]


# What may still be written to


@pytest.mark.parametrize(
    "given_up", [(60, [TRANSFER_FAIL]), (60, [LEASE_EXPIRED]), (0, [])]
)
def test_what_comes_after_a_load_was_given_up_meets_nobody(given_up):
    load = Load(given_up)
    try:
        load.get(1)
    except RuntimeError:
        assert not given_up[1]
    load.store.byte = 2
    write = load.store.write

    def late(call: int) -> None:
        write(call)
        load.store.byte = 3
        write(0)
        load.store.byte = 2

    load.store.write = late  # type: ignore[method-assign]
    assert load.get(4, 5) == [VALUE, VALUE]
    assert load.blocks() == [[4, 5], [4, 5]]
    assert all((cache[4] == 2).all() for cache in load.caches)
    assert load.faults == [SET_ASIDE]


def test_what_is_set_aside_takes_no_memory_even_if_written_to():
    load = Load((60, [TRANSFER_FAIL]), (60, [TRANSFER_FAIL]))
    load.get(1)
    load.store.write(0)
    load.get(1)
    assert load.memory.set_aside_bytes == 2 * RUN
    # Nothing but zeros: their pages are gone, those of the earlier one again.
    for call in (0, 1):
        ((address, num_bytes),) = load.store.places[call]
        assert ctypes.string_at(address, num_bytes) == bytes(num_bytes)


def test_what_is_set_aside_stays_mapped_and_the_rest_does_not():
    kept, dropped = Load((60, [TRANSFER_FAIL])), Load()
    for load in (kept, dropped):
        load.get(1)
    memories = [weakref.ref(load.memory) for load in (kept, dropped)]
    del kept, dropped, load
    gc.collect()
    assert [memory() is not None for memory in memories] == [True, False]
    # Or this would end the process.
    held = memories[0]()
    assert held is not None
    ctypes.memset(held.address, 1, RUN)
    LandingMemory._kept.remove(held)


def test_a_peer_that_is_gone_uses_nothing_up():
    load = Load(*[(1.1, [TRANSFER_FAIL])] * 100)
    for _ in range(100):
        assert load.get(1) == [TRANSFER_FAIL]
    assert load.memory.set_aside_bytes == 0
    assert load.get(1) == [VALUE]
    assert load.faults == []


def test_when_all_is_set_aside_loads_fail_and_say_so_once(monkeypatch):
    errors: list[str] = []
    monkeypatch.setattr(landing.logger, "error", lambda text, *_: errors.append(text))
    load = Load(*[(60, [TRANSFER_FAIL])] * 4)
    for _ in range(4):
        load.get(1)
    num_calls = len(load.store.calls)
    assert [load.get(1, 2) for _ in range(3)] == [[TRANSFER_FAIL] * 2] * 3
    assert len(load.store.calls) == num_calls
    assert load.faults == [SET_ASIDE] * 4 + [REFUSED] * 3
    (error,) = errors
    assert "used up" in error


def test_what_was_complete_before_another_was_given_up_is_copied_first():
    load = Load((60, [VALUE, TRANSFER_FAIL]))
    assert load.get(1, 2) == [VALUE, TRANSFER_FAIL]
    assert load.blocks() == [[1], [1]]


# Calls


def test_calls_fit_into_a_run_and_into_mooncakes_queue():
    load = Load()
    fits = RUN // VALUE
    assert load.get(*[index % 16 for index in range(fits + 1)]) == [VALUE] * (fits + 1)
    assert [len(call) for call in load.store.calls] == [fits, 1]

    load = Load()
    keys = [f"k{index}" for index in range(300)]
    addrs = [[load.caches[0].data_ptr()]] * 300
    load.landed.batch_get_into_multi_buffers(keys, addrs, [[1]] * 300)
    assert [len(call) for call in load.store.calls] == [128, 128, 44]


def test_behind_a_transfer_that_failed_the_rest_is_not_tried():
    fits = RUN // VALUE
    load = Load((0, [VALUE] * (fits - 1) + [TRANSFER_FAIL]))
    got = load.get(*[0] * (2 * fits))
    assert got == [VALUE] * (fits - 1) + [TRANSFER_FAIL] * (fits + 1)
    assert len(load.store.calls) == 1


def test_a_value_longer_than_a_run_lands_too():
    load = Load()
    big = torch.zeros(3 * RUN // 2, dtype=torch.uint8)
    load.get(1)
    load.landed._copier._blocks = KVMemory.of({"big": big})
    got = load.landed.batch_get_into_multi_buffers(
        ["k"], [[big.data_ptr()]], [[len(big)]]
    )
    assert got == [len(big)]
    assert (big == 1).all()


def test_threads_never_share_a_run():
    load = Load()
    other = load.thread()
    load.get(1)
    addr = load.caches[0][2].data_ptr()
    other.batch_get_into_multi_buffers(["k"], [[addr]], [[BUFFER]])
    (first, _), (second, _) = (call[0] for call in load.store.places)
    assert abs(first - second) >= RUN


# Where values go


def test_an_address_outside_the_kv_caches_is_an_error_and_not_written_to():
    load = Load()
    stray = torch.zeros(BUFFER, dtype=torch.uint8)
    inside = load.caches[0][1].data_ptr()
    for address in (stray.data_ptr(), load.caches[0].data_ptr() + 15 * BUFFER + 1):
        with pytest.raises(LookupError, match="in no registered KV cache"):
            load.landed.batch_get_into_multi_buffers(
                ["k"], [[inside, address]], [[BUFFER, BUFFER]]
            )
    assert not stray.any()
    assert load.blocks() == [[], []]


def test_views_of_a_storage_and_lists_of_tensors_are_found():
    storage = torch.zeros(64, dtype=torch.float32)
    memory = KVMemory.of({"a": storage[8:16], "b": [storage[16:], storage[32:]]})
    start = storage.data_ptr()
    assert memory.regions_of([start, start + 255], [256, 1]) is None
    with pytest.raises(LookupError):
        memory.regions_of([start], [257])


def test_caches_that_the_host_cannot_write_to_get_their_bytes_by_torch(monkeypatch):
    """A device's tensor as far as a machine without one can tell."""
    cache = torch.zeros(4, BUFFER, dtype=torch.uint8)
    monkeypatch.setattr(kv_memory, "_stream", lambda _device: Stream())
    start = cache.data_ptr()
    region = kv_memory.Region(start, start + cache.nbytes, cache.view(-1))
    memory = LandingMemory(RUN, RUN)
    copier = kv_memory.Copier(memory.memory, memory.address, KVMemory([region]))
    ctypes.memset(memory.address + BUFFER, 5, BUFFER)
    copier.scatter(0, [cache[2].data_ptr(), cache[1].data_ptr()], [BUFFER, BUFFER])
    copier.synchronize()
    assert cache[:, 0].tolist() == [0, 5, 0, 0]
    assert (cache[1] == 5).all()
    assert Stream.num_waits == 1


class Stream:
    num_waits = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def synchronize(self):
        Stream.num_waits += 1


# Applied to a worker


def worker(store: Store) -> SimpleNamespace:
    threads = [SimpleNamespace(store=store) for _ in range(2)]
    return SimpleNamespace(store=store, kv_recv_threads=threads)


def never(kind: str, message: str) -> None:
    pytest.fail(f"{kind}: {message}")


def test_loads_over_tcp_land_and_others_do_not():
    caches = {"a": torch.zeros(16, dtype=torch.uint8)}
    store = Store()
    one = worker(store)
    assert land_loads(one, "tcp", caches, never)
    assert all(isinstance(thread.store, LandingStore) for thread in one.kv_recv_threads)
    other = worker(store)
    assert not land_loads(other, "rdma", caches, never)
    assert all(thread.store is store for thread in other.kv_recv_threads)


@pytest.mark.parametrize("why", ["no address space", "not registered"])
def test_without_landing_memory_loads_stay_as_they_are_and_the_log_says_so(
    why, monkeypatch
):
    warnings: list[str] = []
    package = "vllm.junctions.repairs.late_loads"
    monkeypatch.setattr(
        f"{package}.logger.warning", lambda *args: warnings.append(args)
    )
    if why == "no address space":
        monkeypatch.setattr(landing, "RESERVED_BYTES", 1 << 62)
        with pytest.raises(Unavailable):
            LandingMemory(1 << 62)
    store = Store()
    if why == "not registered":
        store.register_buffer = lambda *_: -1  # type: ignore[method-assign]
    one = worker(store)
    assert not land_loads(one, "tcp", {}, never)
    assert all(thread.store is store for thread in one.kv_recv_threads)
    assert len(warnings) == 1

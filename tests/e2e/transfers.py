# SPDX-License-Identifier: Apache-2.0
"""The ends of transfers, each a process: some own values, others use their memory.

``python -m tests.e2e.transfers own MASTER NAME``,
``python -m tests.e2e.transfers read MASTER HOW NUM_BUFFERS NUM_THREADS`` and
``python -m tests.e2e.transfers write MASTER HOW NUM_KEYS``; all talk in lines. HOW is
``stock`` or ``ours``.
"""

import json
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from testbed.processes import free_port
from vllm.junctions.repairs.late_loads import land_loads
from vllm.junctions.repairs.short_puts import shorten_puts

OWNERS = ("frozen", "other")
BUFFERS_PER_KEY = (1, 40, 122, 200)
KEYS_PER_OWNER = 8
_BUFFER_BYTES = 16384
_OF_ANOTHER = 255
# How long late transfers may take to arrive; they arrive at once.
_SETTLE_SECONDS = 10


def _connect(master: str, segment_bytes: int) -> Any:
    store = MooncakeDistributedStore()
    status = store.setup(
        f"127.0.0.1:{free_port()}",
        "P2PHANDSHAKE",
        segment_bytes,
        16 << 20,
        "tcp",
        "",
        master,
    )
    assert status == 0
    return store


def own(master: str, name: str) -> None:
    """Hold values of every number of buffers until the end of the standard input."""
    store = _connect(master, 512 << 20)
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    for num_buffers in BUFFERS_PER_KEY:
        for index in range(KEYS_PER_OWNER):
            value = bytes([index + 1]) * (num_buffers * _BUFFER_BYTES)
            assert store.put(f"{name}-{num_buffers}-{index}", value, config) == 0
    print("ready", flush=True)
    sys.stdin.read()


def read(master: str, how: str, buffers: str, threads: str) -> None:
    """Read values of both owners, twice; tell what still comes after the second time.

    Each thread makes one call for all keys, into blocks of its own.
    """
    num_buffers, num_threads = int(buffers), int(threads)
    names = [f"{o}-{num_buffers}-{i}" for i in range(KEYS_PER_OWNER) for o in OWNERS]
    blocks = torch.zeros(
        (num_threads, len(names), num_buffers, _BUFFER_BYTES), dtype=torch.uint8
    )
    stores = _stores(_connect(master, 0), how, num_threads, blocks)
    worst: dict[int, int] = {}

    def load(thread: int) -> None:
        addrs = [[part.data_ptr() for part in value] for value in blocks[thread]]
        sizes = [[_BUFFER_BYTES] * num_buffers] * len(names)
        worst[thread] = min(
            stores[thread].batch_get_into_multi_buffers(names, addrs, sizes)
        )
        # Now the blocks belong to another request.
        blocks[thread] = _OF_ANOTHER

    load(0)
    assert worst[0] == num_buffers * _BUFFER_BYTES, worst
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    loads = [threading.Thread(target=load, args=(one,)) for one in range(num_threads)]
    for one in loads:
        one.start()
    for one in loads:
        one.join()
    seconds = time.monotonic() - start
    print("returned", flush=True)
    # Until the owner has gone on, and for a while.
    sys.stdin.readline()
    time.sleep(_SETTLE_SECONDS)
    late = int((blocks != _OF_ANOTHER).any(dim=3).sum())
    _tell(seconds=seconds, worst=min(worst.values()), late=late)


def _stores(store: Any, how: str, num_threads: int, blocks: torch.Tensor) -> list[Any]:
    """Return the store of each load thread of a worker with these KV blocks."""
    assert store.register_buffer(blocks.data_ptr(), blocks.nbytes) == 0
    threads = [SimpleNamespace(store=store) for _ in range(num_threads)]
    worker = SimpleNamespace(store=store, kv_recv_threads=threads)
    if how == "ours":
        land_loads(worker, "tcp", {"layer": blocks}, lambda *_: None)
    return [thread.store for thread in threads]


def write(master: str, how: str, keys: str) -> None:
    """Write values of 40 buffers in one call; tell how many failed."""
    num_keys, num_buffers = int(keys), 40
    client = _connect(master, 0)
    blocks = torch.ones((num_keys, num_buffers, _BUFFER_BYTES), dtype=torch.uint8)
    assert client.register_buffer(blocks.data_ptr(), blocks.nbytes) == 0
    worker = SimpleNamespace(kv_send_thread=SimpleNamespace(store=client))
    if how == "ours":
        shorten_puts(worker, "tcp")
    start = time.monotonic()
    results = worker.kv_send_thread.store.batch_put_from_multi_buffers(
        [f"{how}-{index}" for index in range(num_keys)],
        [[part.data_ptr() for part in value] for value in blocks],
        [[_BUFFER_BYTES] * num_buffers] * num_keys,
        ReplicateConfig(),
    )
    num_failed = sum(result != 0 for result in results)
    _tell(seconds=time.monotonic() - start, failed=num_failed)


def _tell(**outcome: float) -> None:
    print(json.dumps(outcome), flush=True)
    # Not by way of destructors: the store's wait for what never comes.
    os._exit(0)


if __name__ == "__main__":
    {"own": own, "read": read, "write": write}[sys.argv[1]](*sys.argv[2:])

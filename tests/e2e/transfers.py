# SPDX-License-Identifier: Apache-2.0
"""The two ends of transfers, each a process: one owns values, others use its memory.

``python -m tests.e2e.transfers own MASTER``,
``python -m tests.e2e.transfers read MASTER HOW`` and
``python -m tests.e2e.transfers write MASTER``; all talk in lines.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from testbed.processes import free_port
from vllm.junctions.store.transfers import BoundedStore, TransferLimits

NUM_VALUES = 100
_VALUE_BYTES = 16384
_OF_ANOTHER = 255


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


def own(master: str) -> None:
    """Hold values until the end of the standard input."""
    store = _connect(master, 64 << 20)
    for index in range(NUM_VALUES):
        assert store.put(f"k{index}", bytes([index + 1]) * _VALUE_BYTES) == 0
    print("ready", flush=True)
    sys.stdin.read()


def read(master: str, how: str) -> None:
    """Read all values twice; tell what still comes after the second time.

    How: ``raw``, ``bounded`` (as the connector reads), or ``waited`` (one call that
    is given up, and waited for).
    """
    bounded = how == "bounded"
    limits = TransferLimits.from_environment(os.environ if bounded else {})
    store = _connect(master, 0)
    memory = np.zeros((NUM_VALUES, _VALUE_BYTES), np.uint8)
    assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    if bounded:
        store = BoundedStore(store, limits.max_transfers(2), limits.patience_seconds)
    elif how == "waited":
        store = BoundedStore(store, NUM_VALUES, 30)
    request = (
        [f"k{index}" for index in range(NUM_VALUES)],
        [[memory.ctypes.data + index * _VALUE_BYTES] for index in range(NUM_VALUES)],
        [[_VALUE_BYTES]] * NUM_VALUES,
    )
    assert min(store.batch_get_into_multi_buffers(*request)) == _VALUE_BYTES
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    results = store.batch_get_into_multi_buffers(*request)
    seconds = time.monotonic() - start
    # Now the memory belongs to somebody else.
    memory[:] = _OF_ANOTHER
    print("returned", flush=True)
    # Until the owner has gone on, and for a while.
    sys.stdin.readline()
    time.sleep(10)
    late = int((memory != _OF_ANOTHER).any(axis=1).sum())
    print(json.dumps({"seconds": seconds, "worst": min(results), "late": late}))
    sys.stdout.flush()
    os._exit(0)


def write(master: str) -> None:
    """Write values as the connector does; tell how many are right in the end."""
    limits = TransferLimits.from_environment(os.environ)
    client = _connect(master, 0)
    values = [bytes([index + 1]) * _VALUE_BYTES for index in range(NUM_VALUES)]
    memory = np.frombuffer(b"".join(values), np.uint8).copy()
    assert client.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    store = BoundedStore(client, limits.max_transfers(2), limits.patience_seconds)
    print("ready", flush=True)
    sys.stdin.readline()
    results = store.batch_put_from_multi_buffers(
        [f"w{index}" for index in range(NUM_VALUES)],
        [[memory.ctypes.data + index * _VALUE_BYTES] for index in range(NUM_VALUES)],
        [[_VALUE_BYTES]] * NUM_VALUES,
        ReplicateConfig(),
    )
    print("returned", flush=True)
    sys.stdin.readline()
    # Were anything still to come late, it would have come.
    time.sleep(10)
    right = sum(client.get(f"w{i}") == value for i, value in enumerate(values))
    print(json.dumps({"worst": min(results), "right": right}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    {"own": own, "read": read, "write": write}[sys.argv[1]](*sys.argv[2:])

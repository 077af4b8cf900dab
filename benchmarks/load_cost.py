# SPDX-License-Identifier: Apache-2.0
"""What a load costs over TCP: straight into KV blocks beside landing memory.

256 keys of 40 buffers (a block's layers) from a real ``mooncake_master``'s store: of
another process, and of the reader's own segment. ``make bench-load`` runs it, prints a
table, writes JSON, and fails where a load from a peer costs more than 5 % above direct.

Mooncake takes no more than 2,048 transfers to a peer at a time, so direct reads from a
peer are calls of as many keys as fit; what stock's one call of all keys does is told
apart.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from mooncake.store import MooncakeDistributedStore
from rich.console import Console
from rich.table import Table

from testbed.processes import free_port
from testbed.store import MooncakeMaster
from vllm.junctions.repairs.batches import batches
from vllm.junctions.repairs.late_loads import land_loads

RESULTS = Path(__file__).parent / "results"
NUM_KEYS, NUM_BUFFERS, BUFFER_BYTES = 256, 40, 16384
THREADS = (1, 8)
TARGET_RATIO = 1.05
# Of all threads together; 2,048 is what Mooncake has room for.
_MAX_DIRECT_TRANSFERS = 1280
_VALUE_BYTES = NUM_BUFFERS * BUFFER_BYTES


class Row(msgspec.Struct, frozen=True):
    """One place and number of threads. Medians; each thread loads all keys.

    Attributes:
        repeats: Loads of each side.
        direct_failed: How many of them failed, on a machine too busy for its peer.
        landed_failed: As many by way of landing memory.
    """

    source: str
    num_threads: int
    direct_seconds: float
    landed_seconds: float
    direct_worst_seconds: float
    landed_worst_seconds: float
    repeats: int
    direct_failed: int
    landed_failed: int

    @property
    def ratio(self) -> float:
        return self.landed_seconds / self.direct_seconds


class Report(msgspec.Struct, frozen=True):
    """What a run measured.

    Attributes:
        failed_keys_of_one_call: Of all keys, read straight from a peer in one call.
    """

    rows: list[Row]
    failed_keys_of_one_call: int


class Direct:
    """A store whose reads are cut into calls of few transfers."""

    def __init__(self, store: Any, max_transfers: int) -> None:
        self._store = store
        self._max_transfers = max_transfers

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], addrs: Sequence[Any], sizes: Sequence[Any]
    ) -> list[int]:
        results: list[int] = []
        for one in batches([len(value) for value in addrs], self._max_transfers):
            results += self._store.batch_get_into_multi_buffers(
                keys[one], addrs[one], sizes[one]
            )
        return results


class Reader:
    """A client of the store with KV blocks for all load threads."""

    def __init__(self, store: Any) -> None:
        self.store = store
        num_threads = max(THREADS)
        # By thread and layer, as vLLM's caches: the buffers of a key lie far apart.
        self.blocks = torch.zeros(
            (num_threads, NUM_BUFFERS, NUM_KEYS, BUFFER_BYTES), dtype=torch.uint8
        )
        assert store.register_buffer(self.blocks.data_ptr(), self.blocks.nbytes) == 0
        threads = [SimpleNamespace(store=store) for _ in range(num_threads)]
        worker = SimpleNamespace(store=store, kv_recv_threads=threads)
        assert land_loads(worker, "tcp", {"": self.blocks}, lambda *_: None)
        self.landed = [thread.store for thread in threads]

    def request(self, thread: int) -> tuple[list[str], list[list[int]], Any]:
        """Return keys, addresses and sizes of a thread's load."""
        layers = [layer.data_ptr() for layer in self.blocks[thread]]
        # Not one after the other, as no block table is either.
        addrs = [
            [layer + (index * 37 + 11) % NUM_KEYS * BUFFER_BYTES for layer in layers]
            for index in range(NUM_KEYS)
        ]
        return names(), addrs, [[BUFFER_BYTES] * NUM_BUFFERS] * NUM_KEYS

    def seconds(self, stores: Sequence[Any]) -> float | None:
        """Load all keys by a thread for each store; return how long it took.

        None if a load failed. Values that were loaded are checked.
        """
        requests = [self.request(thread) for thread in range(len(stores))]
        blocks = self.blocks[: len(stores)].zero_()
        results: list[list[int]] = [[] for _ in requests]

        def load(thread: int) -> None:
            get = stores[thread].batch_get_into_multi_buffers
            results[thread] = get(*requests[thread])

        threads = [
            threading.Thread(target=load, args=(index,)) for index in range(len(stores))
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        if min(map(min, results)) < 0:
            return None
        expected = torch.empty(NUM_KEYS, dtype=torch.uint8)
        for index in range(NUM_KEYS):
            expected[(index * 37 + 11) % NUM_KEYS] = content(index)
        assert (blocks == expected[:, None]).all(), "a load was wrong"
        return seconds


def names() -> list[str]:
    return [f"k{index}" for index in range(NUM_KEYS)]


def content(index: int) -> int:
    return 1 + index % 200


def connect(master: str, segment_bytes: int) -> Any:
    store = MooncakeDistributedStore()
    host = f"127.0.0.1:{free_port()}"
    status = store.setup(
        host, "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master
    )
    assert status == 0
    return store


def put_all(store: Any) -> None:
    for index, name in enumerate(names()):
        assert store.put(name, bytes([content(index)]) * _VALUE_BYTES) == 0


def own(master: str) -> None:
    """Hold the values until the end of the standard input."""
    store = connect(master, 512 << 20)
    put_all(store)
    print("ready", flush=True)
    sys.stdin.read()


@contextmanager
def peer(master: str) -> Iterator[None]:
    owner = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.load_cost", "--own", master],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        assert any(line.strip() == "ready" for line in iter(owner.stdout.readline, ""))
        yield
    finally:
        owner.kill()
        owner.wait()


def measure(reader: Reader, source: str, num_threads: int, repeats: int) -> Row:
    """Load by turns straight and by way of landing memory."""
    limit = _MAX_DIRECT_TRANSFERS // num_threads if source == "peer" else 1 << 30
    direct = [Direct(reader.store, limit)] * num_threads
    landed = reader.landed[:num_threads]
    times: dict[str, list[float]] = {"direct": [], "landed": []}
    # The first of each finds connections and pages missing.
    for turn in range(repeats + 1):
        for how, stores in (("direct", direct), ("landed", landed)):
            seconds = reader.seconds(stores)
            if turn and seconds is not None:
                times[how].append(seconds)
    direct_seconds, landed_seconds = times.values()
    return Row(
        source,
        num_threads,
        statistics.median(direct_seconds),
        statistics.median(landed_seconds),
        max(direct_seconds),
        max(landed_seconds),
        repeats,
        repeats - len(direct_seconds),
        repeats - len(landed_seconds),
    )


def run(work_dir: Path, repeats: int) -> Report:
    rows = []
    with MooncakeMaster(work_dir) as master:
        address = f"127.0.0.1:{master.rpc_port}"
        with peer(address):
            reader = Reader(connect(address, 0))
            rows += [measure(reader, "peer", one, repeats) for one in THREADS]
            # Last: it leaves the peer out of reach for a while.
            results = reader.store.batch_get_into_multi_buffers(*reader.request(0))
    with MooncakeMaster(work_dir) as master:
        store = connect(f"127.0.0.1:{master.rpc_port}", 512 << 20)
        put_all(store)
        reader = Reader(store)
        rows += [measure(reader, "own segment", one, repeats) for one in THREADS]
    return Report(rows, sum(result < 0 for result in results))


def show(report: Report) -> None:
    mib = NUM_KEYS * _VALUE_BYTES / (1 << 20)
    table = Table(
        title=f"{NUM_KEYS} keys of {NUM_BUFFERS} buffers, {mib:g} MiB a thread; medians"
    )
    for name in (
        "from",
        "threads",
        "direct, s",
        "landed, s",
        "ratio",
        "worst",
        "failed",
    ):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            row.source,
            str(row.num_threads),
            f"{row.direct_seconds:.3f}",
            f"{row.landed_seconds:.3f}",
            f"{row.ratio:.2f}",
            f"{row.direct_worst_seconds:.3f}, {row.landed_worst_seconds:.3f}",
            f"{row.direct_failed}, {row.landed_failed}",
        )
    Console().print(table)
    print(
        f"All keys straight from a peer in one call, as stock reads: "
        f"{report.failed_keys_of_one_call} of {NUM_KEYS} failed."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS / "load_cost.json")
    parser.add_argument("--own", metavar="MASTER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        own(args.own)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), args.repeats)
    show(report)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_bytes(msgspec.json.encode(report))
    missed = [
        row for row in report.rows if row.source == "peer" and row.ratio > TARGET_RATIO
    ]
    sys.exit(f"Above {TARGET_RATIO} of direct: {missed}" if missed else 0)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What a store lookup costs: stock beside two-phase lookups, on the same store.

DeepSeek-V4-Flash's group layout with MTP, the real lookup of both workers, a real
``mooncake_master`` on loopback and an in-memory store that is as slow as a network.
``make bench-lookup`` runs it, prints a table, writes JSON and a plot, and fails where
a target is missed.
"""

import argparse
import hashlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    BlobBlockHashes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    MooncakeStoreWorker,
)

from benchmarks.seed_table import LAYOUT, TAIL_TOKENS
from testbed.lookup_worker import ExistenceStore, build_worker
from testbed.processes import free_port
from testbed.store import MooncakeMaster
from vllm.junctions.lookup.two_phase.plan import LookupPlan
from vllm.junctions.store.worker import JunctionStoreWorker

RESULTS = Path(__file__).parent / "results"
SIZES = tuple(1 << bits for bits in range(12, 21))
# Beside these, more than the evidence at any position: see ``crowded``.
TARGET_CASES = ("full hit", "first sibling", "third sibling", "cold", "holes")
CASES = (*TARGET_CASES, "crowded")
TARGET_TOKENS = 131_072
TARGET_KEYS_RATIO = 10
TARGET_SECONDS_RATIO = 5
# A network's round trip, and what each key adds at the far end.
RPC_SECONDS = 200e-6
KEY_SECONDS = 1e-6
_HASH_BYTES = 32
_TURN_TOKENS = 4096
_MIN_REPEATS, _MAX_REPEATS = 5, 400
_CASE_SECONDS = 3


class Row(msgspec.Struct, frozen=True):
    """One case on one store. Medians; ``python_seconds`` is what no call took."""

    case: str
    store: str
    num_tokens: int
    stock_keys: int
    keys: int
    stock_rpcs: int
    rpcs: int
    max_rpcs: int
    stock_seconds: float
    seconds: float
    stock_python_seconds: float
    python_seconds: float
    repeats: int

    @property
    def keys_ratio(self) -> float:
        return self.stock_keys / self.keys

    @property
    def seconds_ratio(self) -> float:
        return self.stock_seconds / self.seconds


class LookupCosts(msgspec.Struct, frozen=True):
    """What ``results/lookup_cost.json`` holds."""

    rows: list[Row]


# What the store holds in each case


@dataclass(frozen=True)
class Request:
    """A request, and the keys that the store holds of it.

    Attributes:
        num_tokens: Its tokens.
        block_hashes: Its block hashes, as the lookup server hands them over.
        keys: Keys in the store.
    """

    num_tokens: int
    block_hashes: BlobBlockHashes
    keys: list[str]


def make_request(case: str, num_tokens: int, worker: Any) -> Request:
    num_hashes = num_tokens // LAYOUT.hash_tokens
    blob = b"".join(
        hashlib.sha256(f"{case}/{num_tokens}/{index}".encode()).digest()
        for index in range(num_hashes)
    )
    hashes = BlobBlockHashes(memoryview(blob), _HASH_BYTES)
    keys = [
        f"{worker._lookup_key_prefixes[group_id][0]}@{hashes[unit].hex()}"
        for group_id, unit in sorted(_STORED[case](num_tokens, worker.coord))
    ]
    return Request(num_tokens, hashes, keys)


Stored = set[tuple[int, int]]


def _saved(
    coord: Any, num_tokens: int, junctions: Sequence[int], replay_tokens: int
) -> Stored:
    """Return ``(group id, hash unit)`` of what a request's saves leave in the store."""
    block = LAYOUT.scheduler_block_tokens
    aligned = num_tokens // block * block
    masks = coord.store_mask(aligned, 0, replay_tokens, junctions)
    stored = set()
    for group_id, mask in enumerate(masks):
        units = LAYOUT.groups[group_id].block_tokens // LAYOUT.hash_tokens
        for index in range(aligned // LAYOUT.groups[group_id].block_tokens):
            if mask is None or mask[index]:
                stored.add((group_id, (index + 1) * units - 1))
    return stored


def _full_hit(num_tokens: int, coord: Any) -> Stored:
    return _saved(coord, num_tokens, (), num_tokens)


def _shared_tokens(num_tokens: int) -> int:
    return num_tokens - TAIL_TOKENS


def _first_sibling(num_tokens: int, coord: Any) -> Stored:
    # The first request's replay tail is past what is shared: not within reach.
    return _saved(coord, _shared_tokens(num_tokens), (), 1)


def _third_sibling(num_tokens: int, coord: Any) -> Stored:
    shared = _shared_tokens(num_tokens)
    block = LAYOUT.scheduler_block_tokens
    longest = shared // block * block - block
    return _saved(coord, shared, coord.junctions(0, longest), 1)


def _cold(num_tokens: int, coord: Any) -> Stored:
    return set()


def _holes(num_tokens: int, coord: Any) -> Stored:
    """A tail every 4,096 tokens, as turns of a chat leave; all but one lost keys.

    Half of their keys, as an eviction under way leaves them.
    """
    rng = random.Random(num_tokens)
    shared = _shared_tokens(num_tokens)
    turns = list(range(min(_TURN_TOKENS, shared // 2), shared - 256, _TURN_TOKENS))
    whole = turns[len(turns) // 4]
    prefix = _saved(coord, shared, (), 1)
    tails = _saved(coord, shared, turns, 1) - prefix
    kept = _saved(coord, shared, (whole,), 1) | prefix
    return kept | {key for key in sorted(tails) if rng.random() < 0.5}


def _crowded(num_tokens: int, coord: Any) -> Stored:
    """At every position the sliding windows' blocks, and nothing of the others.

    No store gets like this by itself: each piece of evidence is there and proves
    nothing. For the bound of calls.
    """
    every = range(256, num_tokens, 256)
    stored = _saved(coord, _shared_tokens(num_tokens), every, 1)
    return {(g, u) for g, u in stored if g != 4}


_STORED: dict[str, Callable[[int, Any], Stored]] = {
    "full hit": _full_hit,
    "first sibling": _first_sibling,
    "third sibling": _third_sibling,
    "cold": _cold,
    "holes": _holes,
    "crowded": _crowded,
}


# Stores


class SlowStore:
    """Keys in memory; a call takes as long as it would over a network."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def put(self, keys: list[str]) -> None:
        self._keys.update(keys)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        end = time.perf_counter() + RPC_SECONDS + KEY_SECONDS * len(keys)
        found = [int(key in self._keys) for key in keys]
        # Not a sleep: that takes a good deal longer than it is told.
        while time.perf_counter() < end:
            pass
        return found


class RealStore:
    """A client of a real master, with a segment for the values."""

    def __init__(self, master: MooncakeMaster) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        status = self._store.setup(
            f"127.0.0.1:{free_port()}",
            "P2PHANDSHAKE",
            256 << 20,
            16 << 20,
            "tcp",
            "",
            f"127.0.0.1:{master.rpc_port}",
        )
        if status != 0:
            raise RuntimeError(f"mooncake client set-up failed with {status}")
        self.batch_is_exist = self._store.batch_is_exist

    def put(self, keys: list[str]) -> None:
        for start in range(0, len(keys), 1000):
            part = keys[start : start + 1000]
            status = self._store.put_batch(part, [b"v"] * len(part))
            if status != 0:
                raise RuntimeError(f"putting {len(part)} keys failed with {status}")

    def close(self) -> None:
        self._store.close()


@contextmanager
def real_store() -> Iterator[RealStore]:
    with (
        tempfile.TemporaryDirectory() as folder,
        MooncakeMaster(Path(folder)) as master,
    ):
        store = RealStore(master)
        try:
            yield store
        finally:
            store.close()


class CountingStore:
    """Counts calls, keys and the time that calls take."""

    def __init__(self, store: ExistenceStore) -> None:
        self._store = store
        self.reset()

    def reset(self) -> None:
        self.num_rpcs = 0
        self.num_keys = 0
        self.seconds = 0.0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        start = time.perf_counter()
        found = self._store.batch_is_exist(keys)
        self.seconds += time.perf_counter() - start
        self.num_rpcs += 1
        self.num_keys += len(keys)
        return found


# Measuring


class Side:
    """One worker on a store, and what its lookups cost."""

    def __init__(self, cls: type[MooncakeStoreWorker], store: ExistenceStore) -> None:
        self.store = CountingStore(store)
        self.worker = build_worker(cls, LAYOUT, self.store)
        self.seconds: list[float] = []
        self.python_seconds: list[float] = []

    def look_up(self, request: Request) -> Any:
        self.store.reset()
        start = time.perf_counter()
        result = self.worker.lookup(request.num_tokens, request.block_hashes)
        seconds = time.perf_counter() - start
        self.seconds.append(seconds)
        self.python_seconds.append(seconds - self.store.seconds)
        return result


def measure(case: str, store_name: str, store: Any, num_tokens: int) -> Row:
    """Look the same request up by turns, stock and ours; compare what they find."""
    stock, ours = Side(MooncakeStoreWorker, store), Side(JunctionStoreWorker, store)
    plan = LookupPlan(ours.worker.coord, ours.worker._lookup_key_prefixes)
    ours.worker._lookup_plan = plan
    request = make_request(case, num_tokens, ours.worker)
    store.put(request.keys)
    start = time.perf_counter()
    for index in range(_MAX_REPEATS + 1):
        if index > _MIN_REPEATS and time.perf_counter() - start > _CASE_SECONDS:
            break
        expected, found = stock.look_up(request), ours.look_up(request)
        if (expected.hit_length, expected.tail_key_boundaries) != (
            found.hit_length,
            found.tail_key_boundaries,
        ):
            raise AssertionError(f"{case}: stock found {expected}, ours {found}")
        if index == 0:
            # The first is a warm-up.
            for side in (stock, ours):
                side.seconds.clear()
                side.python_seconds.clear()
    return Row(
        case,
        store_name,
        num_tokens,
        stock.store.num_keys,
        ours.store.num_keys,
        stock.store.num_rpcs,
        ours.store.num_rpcs,
        plan.max_rpcs(num_tokens),
        statistics.median(stock.seconds),
        statistics.median(ours.seconds),
        statistics.median(stock.python_seconds),
        statistics.median(ours.python_seconds),
        len(ours.seconds),
    )


def failures(rows: Sequence[Row]) -> list[str]:
    """Say in words which target is missed; empty when all are met."""
    missed = []
    for row in rows:
        name = f"{row.case}, {row.store}, {row.num_tokens} tokens"
        if row.rpcs > row.max_rpcs:
            missed.append(f"{name}: {row.rpcs} calls, at most {row.max_rpcs} promised")
        if row.case not in TARGET_CASES:
            continue
        if row.num_tokens == TARGET_TOKENS and row.keys_ratio < TARGET_KEYS_RATIO:
            missed.append(f"{name}: {row.keys_ratio:.1f} times fewer keys")
        if (
            row.num_tokens == TARGET_TOKENS
            and row.store == "master"
            and row.seconds_ratio < TARGET_SECONDS_RATIO
        ):
            missed.append(f"{name}: {row.seconds_ratio:.1f} times less time")
        if row.num_tokens == min(SIZES) and row.seconds > row.stock_seconds:
            missed.append(f"{name}: slower than stock")
    return missed


def print_table(rows: Sequence[Row], console: Console) -> None:
    view = Table(title="A store lookup: stock / two-phase (times in ms, medians)")
    for column in ("case", "store", "tokens", "keys", "", "calls", "Python", "wall"):
        view.add_column(
            column, justify="left" if column in ("case", "store") else "right"
        )
    view.add_column("")
    for row in rows:
        view.add_row(
            row.case,
            row.store,
            f"{row.num_tokens:,}",
            f"{row.stock_keys:,} / {row.keys:,}",
            f"{row.keys_ratio:.1f}x",
            f"{row.stock_rpcs} / {row.rpcs}",
            f"{row.stock_python_seconds * 1e3:.2f} / {row.python_seconds * 1e3:.2f}",
            f"{row.stock_seconds * 1e3:.2f} / {row.seconds * 1e3:.2f}",
            f"{row.seconds_ratio:.1f}x",
        )
    console.print(view)


def plot(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stores = list(dict.fromkeys(row.store for row in rows))
    figure, axes = pyplot.subplots(
        1, len(stores) + 1, figsize=(5.2 * (len(stores) + 1), 4.8), squeeze=False
    )
    panels: list[tuple[Any, str, str, float]] = [
        (axes[0][0], stores[0], "keys", 1),
        *((axes[0][1 + i], name, "seconds", 1e3) for i, name in enumerate(stores)),
    ]
    for axis, store, what, scale in panels:
        for index, case in enumerate(CASES):
            mine = [row for row in rows if (row.case, row.store) == (case, store)]
            tokens = [row.num_tokens for row in mine]
            for prefix, style in (("stock_", "--"), ("", "-")):
                values = [getattr(row, prefix + what) * scale for row in mine]
                axis.plot(
                    tokens,
                    values,
                    style,
                    color=f"C{index}",
                    marker="o" if not prefix else None,
                    markersize=3,
                    linewidth=1.2,
                    label=case if not prefix else None,
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens of the request")
        axis.grid(True, which="major", alpha=0.3)
        axis.set_title("keys asked for" if what == "keys" else f"lookup, {store} (ms)")
    axes[0][0].plot([], [], "k--", linewidth=1.2, label="stock")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def run(sizes: Sequence[int], json_path: Path, console: Console) -> int:
    """Measure, print, write; return an exit status."""
    rows = []
    with real_store() as master:
        for name, store in (("master", master), ("slow", SlowStore())):
            for case in CASES:
                for num_tokens in sizes:
                    rows.append(measure(case, name, store, num_tokens))
    print_table(rows, console)
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_bytes(msgspec.json.format(msgspec.json.encode(LookupCosts(rows))))
    plot(rows, json_path.with_suffix(".png"))
    console.print(f"Written to {json_path} and {json_path.with_suffix('.png')}")
    missed = failures(rows)
    for one in missed:
        console.print(f"[bold red]TARGET MISSED:[/] {one}")
    return 1 if missed else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "lookup_cost.json")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="tokens, each 4096 or more"
    )
    args = parser.parse_args(argv)
    return run(args.sizes, args.json, Console(width=120))


if __name__ == "__main__":
    sys.exit(main())

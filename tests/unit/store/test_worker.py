# SPDX-License-Identifier: Apache-2.0
"""What a worker counts and logs, over a plain store; what it does runs in a box."""

import logging
import threading

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    BoundaryPut,
    ChunkedTokenDatabase,
    KeyMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
)

import vllm.junctions.store.worker as worker_module
from tests.support import coordinator, full, groups, hashes, mamba, swa
from vllm.junctions.lookup.found import Found
from vllm.junctions.lookup.two_phase.plan import LookupPlan
from vllm.junctions.metrics.counted import JunctionCounters
from vllm.junctions.store.data import JunctionReqMeta
from vllm.junctions.store.sender import JunctionSendingThread
from vllm.junctions.store.worker import JunctionStoreWorker

_BLOCK = 32


class KeyStore:
    """The calls that saves and lookups make, over a set of keys."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.error_code: int | None = None
        self.refused: set[str] = set()
        self.fails = False

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        if self.fails:
            raise RuntimeError("store gone")
        if self.error_code is not None:
            return [self.error_code] * len(keys)
        return [int(key in self.keys) for key in keys]

    def batch_put_from_multi_buffers(self, keys, addrs, sizes, config) -> list[int]:
        refused = {key for key in keys if any(part in key for part in self.refused)}
        self.keys.update(set(keys) - refused)
        return [-1 if key in refused else 0 for key in keys]


def _databases(coord) -> list[ChunkedTokenDatabase]:
    databases = []
    for group_id, group in enumerate(coord.kv_cache_groups):
        metadata = KeyMetadata("model", 0, 0, 0, 0, group_id=group_id)
        database = ChunkedTokenDatabase(
            metadata, group.kv_cache_spec.block_size, coord.hash_block_size
        )
        database.set_kv_caches_base_addr([4096])
        database.set_block_len([64])
        databases.append(database)
    return databases


def _sender(store, coord) -> JunctionSendingThread:
    return JunctionSendingThread(
        store,
        coord,
        _databases(coord),
        coord.lcm_block_size,
        0,
        [1] * len(coord.kv_cache_groups),
        "kv_both",
        threading.Event(),
    )


def _save(sender, block_hashes, num_tokens, junctions, null_blocks=()) -> None:
    """Run one store job of a request that has computed ``num_tokens``."""
    block_ids = tuple(
        [
            0 if (group_id, index) in null_blocks else index + 1
            for index in range(num_tokens // _BLOCK)
        ]
        for group_id in range(2)
    )
    job = JunctionReqMeta(
        req_id="r",
        token_len_chunk=num_tokens,
        block_ids=block_ids,
        block_hashes=block_hashes,
        can_save=True,
        prefill_end_tokens=1000,
        store_job_id=1,
        shared_prefix_boundaries=junctions,
    )
    sender.add_request(sender_job := job)
    sender.request_queue.get()
    sender._handle_request(sender_job)


@pytest.fixture
def layout():
    return coordinator(groups([full(_BLOCK), swa(_BLOCK, 64)]), _BLOCK)


@pytest.fixture(params=["two phases", "all at once"])
def worker_on(request):
    def build(store, coord) -> JunctionStoreWorker:
        worker = _worker(store, coord)
        if request.param == "two phases":
            worker._lookup_plan = LookupPlan(coord, worker._lookup_key_prefixes)
        return worker

    return build


def _worker(store, coord) -> JunctionStoreWorker:
    """A worker with what lookups use; a whole one runs in tests/engine."""
    worker = object.__new__(JunctionStoreWorker)
    worker.counters = JunctionCounters()
    worker._capacity_only = False
    worker.coord = coord
    worker.store = store
    worker.hash_block_size = coord.hash_block_size
    worker.token_dbs = _databases(coord)
    worker._kv_cache_groups = coord.kv_cache_groups
    worker._lookup_key_prefixes = tuple(
        database.store_layout.lookup_key_prefixes(((0, 0, 0, 0),))
        for database in worker.token_dbs
    )
    worker._kv_connector_stats_lock = threading.Lock()
    worker.kv_connector_stats = MooncakeStoreConnectorStats()
    return worker


def _lookup(worker, num_tokens, block_hashes):
    result = worker.lookup(num_tokens, block_hashes)
    return result.hit_length, list(getattr(result, "junctions", ()))


def test_a_fault_in_the_lookup_costs_the_hit_and_is_counted(
    layout, monkeypatch, worker_on
):
    store, block_hashes = KeyStore(), hashes(31)
    worker = worker_on(store, layout)
    monkeypatch.setattr(
        layout, "junctions", lambda *args: (_ for _ in ()).throw(KeyError("x"))
    )
    for _ in range(2):
        assert _lookup(worker, 992, block_hashes) == (0, [])
    assert worker.counters.failed_lookups == 2


def _taken(counters) -> dict[tuple[str, ...], list[float]]:
    values: dict[tuple[str, ...], list[float]] = {}
    for record in counters.take():
        name = record["name"].removeprefix("vllm:junctions_")
        values.setdefault((name, *record["labels"]), []).append(record["value"])
    return values


def _outcomes(worker) -> list[str]:
    return [key[1] for key in _taken(worker.counters) if key[0] == "lookups_total"]


def test_lookups_are_counted_by_outcome(layout):
    store, block_hashes = KeyStore(), hashes(31)
    worker = _worker(store, layout)
    worker.lookup(992, block_hashes)
    assert _outcomes(worker) == ["nothing_stored"]
    worker.lookup(20, [])
    assert _outcomes(worker) == ["too_short"]
    _save(_sender(store, layout), block_hashes, 992, ())
    worker.lookup(1000, block_hashes)
    assert _outcomes(worker) == ["hit"]
    worker.lookup(26 * 32, block_hashes[:16] + hashes(10, "sibling"))
    assert _taken(worker.counters) == {
        ("lookups_total", "tail_missing"): [1],
        ("lost_tokens", "1-SlidingWindow-32"): [512],
        ("lookup_keys",): [52],
        ("lookup_rpcs",): [1],
    }


@pytest.mark.parametrize("how", ["raises", "answers error codes"])
def test_a_store_that_is_gone_is_an_error_and_not_nothing_stored(
    layout, how, worker_on
):
    """Mooncake's client answers -900 for every key once its master is gone."""
    store = KeyStore()
    if how == "raises":
        store.fails = True
    else:
        store.error_code = -900
    worker = worker_on(store, layout)
    assert _lookup(worker, 992, hashes(31)) == (0, [])
    # Stock survives this by itself: no fault of ours.
    assert worker.counters.failed_lookups == 0
    assert _outcomes(worker) == ["error"]


def test_a_store_that_fails_in_part_still_hits(layout):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, ())
    answers = store.batch_is_exist
    # One key above the prefix that hits.
    sibling = block_hashes[:31] + hashes(2, "sibling")
    bad = sibling[-1].hex()
    store.batch_is_exist = lambda keys: [
        -900 if key.endswith(bad) else answer
        for key, answer in zip(keys, answers(keys), strict=True)
    ]
    worker = _worker(store, layout)
    assert _lookup(worker, 33 * 32, sibling)[0] == 992
    assert _outcomes(worker) == ["hit"]


def _tails_counted(sender) -> tuple[float, float, float]:
    """Blocks, bytes, and blocks that were gone."""
    taken = _taken(sender.counters)
    return tuple(
        sum(taken.get((f"tail_{name}_total",), [0]))
        for name in ("blocks_saved", "bytes_saved", "blocks_skipped")
    )


@pytest.mark.parametrize(
    ("junctions", "blocks"),
    # The replay tail ends at 992; a junction there needs nothing more.
    [((), 0), ((512,), 2), ((256, 512), 4), ((992,), 0), ((480, 512), 3)],
)
def test_what_junctions_add_to_a_save_is_counted(layout, junctions, blocks):
    sender = _sender(KeyStore(), layout)
    _save(sender, hashes(31), 992, junctions)
    assert _tails_counted(sender) == (blocks, 64 * blocks, 0)


def test_a_tail_that_is_stored_already_is_not_counted_again(layout):
    sender = _sender(KeyStore(), layout)
    _save(sender, hashes(31), 992, (512,))
    assert _tails_counted(sender) == (2, 128, 0)
    sender._saved_offset.clear()
    _save(sender, hashes(31), 992, (512,))
    assert _tails_counted(sender) == (0, 0, 0)


def test_a_tail_block_that_was_gone_is_counted_once(layout):
    store = KeyStore()
    sender = _sender(store, layout)
    store.refused = {"@group:0@"}  # the job fails, and is tried again
    _save(sender, hashes(31), 992, (512,), {(1, 14)})
    assert _tails_counted(sender) == (1, 64, 0)
    store.refused = set()
    _save(sender, hashes(31), 992, (512,), {(1, 14)})
    assert _tails_counted(sender) == (0, 0, 1)


def test_a_tail_block_that_the_store_refused_is_not_counted(layout):
    store = KeyStore()
    sender = _sender(store, layout)
    store.refused = {"@group:1@"}
    _save(sender, hashes(31), 992, (512,))
    assert _tails_counted(sender) == (0, 0, 0)


def test_states_at_junctions_are_counted_and_own_ones_are_not():
    coord = coordinator(groups([full(_BLOCK), mamba(_BLOCK)]), _BLOCK)
    store, block_hashes = KeyStore(), hashes(31)
    sender = _sender(store, coord)
    job = JunctionReqMeta(
        req_id="r",
        token_len_chunk=0,
        block_ids=([1], [1]),
        block_hashes=block_hashes,
        can_save=True,
        prefill_end_tokens=993,
        store_job_id=1,
        shared_prefix_boundaries=(512, 992),
        boundary_puts=[
            BoundaryPut(1, 3, 512),
            BoundaryPut(1, 4, 992),  # where a replay of the prompt resumes
            BoundaryPut(1, 5, 640),
        ],
    )
    sender.add_request(job)
    sender.request_queue.get()
    sender._handle_request(job)
    assert len(store.keys) == 3
    assert _tails_counted(sender) == (1, 64, 0)


@pytest.fixture
def debug_lines(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(
        worker_module.logger, "isEnabledFor", lambda level: level == logging.DEBUG
    )
    monkeypatch.setattr(
        worker_module.logger,
        "debug",
        lambda text, *args, **_: lines.append(text % args),
    )
    return lines


def test_with_debug_logging_a_lookup_is_explained_in_one_line(layout, debug_lines):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, ())
    sibling = block_hashes[:16] + hashes(10, "sibling")
    _worker(store, layout).lookup(26 * 32, sibling)
    assert debug_lines == [
        f"Lookup of 832 tokens (last block {sibling[-1].hex()[:8]}): hit 0 of at most "
        "800, longest 512; 0-FullAttention-32 512, 1-SlidingWindow-32 0; junctions "
        "512. Why: 1-SlidingWindow-32 has no tail or state above 0."
    ]


def test_an_explanation_asks_for_what_the_lookup_did_not(
    layout, debug_lines, monkeypatch
):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, ())
    monkeypatch.setattr(
        JunctionStoreWorker, "_look_up", lambda self, *_: Found(0, 512, (), 1)
    )
    worker = _worker(store, layout)
    worker.lookup(832, block_hashes[:16] + hashes(10, "sibling"))
    assert "0-FullAttention-32 512, 1-SlidingWindow-32 0" in debug_lines[0]
    # That is no part of what the lookup cost.
    assert ("lookup_keys",) not in _taken(worker.counters)

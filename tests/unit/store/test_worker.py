# SPDX-License-Identifier: Apache-2.0
"""The lookup client against a real socket, the worker against a plain store."""

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    BoundaryPut,
    ChunkedTokenDatabase,
    KeyMetadata,
    MooncakeLookupResult,
    TailKeyBoundary,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol import (
    encode_lookup_response,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    get_zmq_rpc_path_lookup,
)

import vllm.junctions.store.worker as worker_module
from tests.support import coordinator, full, groups, hashes, mamba, swa
from vllm.junctions import repairs
from vllm.junctions.lookup.client import JunctionLookupClient
from vllm.junctions.lookup.found import Found
from vllm.junctions.lookup.two_phase.plan import LookupPlan
from vllm.junctions.lookup.wire import HitUnits, add_junctions
from vllm.junctions.metrics.counted import LOOKUPS, JunctionCounters
from vllm.junctions.metrics.report import LookupOutcome
from vllm.junctions.seams.switches import switch_on
from vllm.junctions.store.data import JunctionReqMeta
from vllm.junctions.store.sender import JunctionSendingThread
from vllm.junctions.store.server import ServedWorker
from vllm.junctions.store.worker import JunctionStoreWorker

_BLOCK = 32


class AnsweringServer:
    """Answers every lookup with the same bytes; nothing if they are None."""

    def __init__(self, path: str) -> None:
        self.payload: bytes | None = b""
        self._socket = zmq.Context.instance().socket(zmq.REP)
        self._socket.bind(path)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._stop = threading.Event()
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(50):
                self._socket.recv_multipart()
                while self.payload is None and not self._stop.is_set():
                    self._stop.wait(0.01)
                self._socket.send(self.payload or b"")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)


@pytest.fixture
def channel(
    tmp_path_factory, monkeypatch
) -> Iterator[tuple[JunctionLookupClient, AnsweringServer]]:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path_factory.mktemp("s")))
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"junctions_lookup_timeout_ms": 60_000}
        ),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )
    server = AnsweringServer(get_zmq_rpc_path_lookup(config))
    client = JunctionLookupClient(config)
    client.hit_units = HitUnits(_BLOCK, hit=_BLOCK, block_size=_BLOCK)
    repairs.HOOKS.install()
    switch_on(client, ["silent_lookups"])
    yield client, server
    repairs.HOOKS.uninstall()
    client.close()
    server.close()


def _look_up(client, num_tokens=1000):
    return client.lookup("r", num_tokens, hashes(num_tokens // _BLOCK))


def test_a_good_answer_gives_the_hit_and_waits_with_the_junctions(channel):
    client, server = channel
    tails = (TailKeyBoundary(0, 512), TailKeyBoundary(1, 512))
    server.payload = encode_lookup_response(
        add_junctions(MooncakeLookupResult(512, tails), (768, 800))
    )
    result = _look_up(client)
    assert (result.hit_length, result.tail_key_boundaries) == (512, tails)
    assert client.take_junctions("r") == (768, 800)
    assert client.take_junctions("r") is None


def test_an_answer_without_junctions_replaces_earlier_ones(channel):
    client, server = channel
    server.payload = bytes(4)
    _look_up(client)
    assert client.take_junctions("r") == ()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0\0\0",
        bytes(5),
        bytes(11),
        (1024).to_bytes(4, "big"),
        (33).to_bytes(4, "big"),
        (64).to_bytes(4, "big") + bytes(8),
        (64).to_bytes(4, "big") + bytes(4) + (2048).to_bytes(4, "big"),
    ],
)
def test_a_malformed_answer_costs_the_hit_and_is_logged_once(channel, payload, caplog):
    client, server = channel
    server.payload = payload
    for _ in range(3):
        assert _look_up(client).hit_length == 0
        assert client.take_junctions("r") is None
    assert client.counters.malformed_payloads == 3
    # The next answer is read as if nothing had happened.
    server.payload = encode_lookup_response(MooncakeLookupResult(64))
    assert _look_up(client).hit_length == 64


def test_a_junction_outside_the_request_costs_that_entry_only(channel):
    client, server = channel
    server.payload = encode_lookup_response(
        add_junctions(MooncakeLookupResult(64), (0, 512, 4096))
    )
    assert _look_up(client).hit_length == 64
    assert client.take_junctions("r") == (512,)
    assert client.counters.dropped_entries == 2
    assert client.counters.malformed_payloads == 0


def test_a_lookup_under_way_says_nothing_yet(channel):
    client, server = channel
    server.payload = encode_lookup_response(
        add_junctions(MooncakeLookupResult(0), (512,))
    )
    block_hashes = hashes(1000 // _BLOCK)
    result = client.lookup("r", 1000, block_hashes, non_block=True)
    while result is None:
        assert client.take_junctions("r") is None
        result = client.lookup("r", 1000, block_hashes, non_block=True)
    assert client.take_junctions("r") == (512,)


def test_an_aborted_request_leaves_nothing(channel):
    client, server = channel
    server.payload = encode_lookup_response(
        add_junctions(MooncakeLookupResult(0), (512,))
    )
    _look_up(client)
    client.discard("r")
    assert client.take_junctions("r") is None


def test_an_answer_that_comes_late_is_for_nobody(channel):
    client, server = channel
    server.payload = None
    client.lookup_timeout_ms = 50
    assert _look_up(client).hit_length == 0
    # Not sent: the server is known to be silent.
    client.lookup_timeout_ms = 60_000
    assert _look_up(client).hit_length == 0
    assert client.counters.timed_out_lookups == 2
    outcome = {"name": LOOKUPS.name, "labels": ["timeout"], "value": 2}
    assert outcome in client.counters.take()
    assert client.take_junctions("r") is None

    client.lookup_patience.answered()
    server.payload = encode_lookup_response(MooncakeLookupResult(64))
    assert _look_up(client).hit_length == 64
    # A reset waits as long as it takes, and gets its own answer.
    server.payload = b"\x01"
    assert client.reset() is True
    assert client.socket.rcvtimeo == -1


class KeyStore:
    """The calls that saves and lookups make, over a set of keys."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.error_code: int | None = None
        self.refused: set[str] = set()
        self.num_exist_calls = 0
        self.num_probed_keys = 0
        self.fails = False

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        if self.fails:
            raise RuntimeError("store gone")
        self.num_exist_calls += 1
        self.num_probed_keys += len(keys)
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


def _stored_ends(store, block_hashes, group_id) -> list[int]:
    """Ends of the stored chunks of a group, in tokens."""
    suffixes = {
        key.rsplit("@", 1)[1] for key in store.keys if f"@group:{group_id}@" in key
    }
    return [
        (index + 1) * _BLOCK
        for index, block_hash in enumerate(block_hashes)
        if block_hash.hex() in suffixes
    ]


@pytest.fixture
def layout():
    return coordinator(groups([full(_BLOCK), swa(_BLOCK, 64)]), _BLOCK)


@pytest.mark.parametrize(
    ("junctions", "tails"),
    [
        ((), [960, 992]),
        ((512,), [480, 512, 960, 992]),
        ((256, 512), [224, 256, 480, 512, 960, 992]),
    ],
)
def test_a_save_puts_the_tails_at_junctions(layout, junctions, tails):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, junctions)
    assert _stored_ends(store, block_hashes, 0) == list(range(32, 993, 32))
    assert _stored_ends(store, block_hashes, 1) == tails


def test_junctions_of_one_job_do_not_reach_the_next(layout):
    store, block_hashes, others = KeyStore(), hashes(31), hashes(31, "other")
    sender = _sender(store, layout)
    _save(sender, block_hashes, 992, (512,))
    sender._saved_offset.clear()
    _save(sender, others, 992, ())
    assert _stored_ends(store, others, 1) == [960, 992]


def test_a_tail_block_that_the_window_freed_is_never_put(layout):
    store, block_hashes = KeyStore(), hashes(31)
    freed = {(1, 14)}  # tokens 448..480 of the sliding-window group
    _save(_sender(store, layout), block_hashes, 992, (512,), freed)
    assert _stored_ends(store, block_hashes, 1) == [512, 960, 992]


@pytest.fixture(params=["two phases", "all at once"])
def way(request) -> str:
    """How lookups ask the store."""
    return request.param


@pytest.fixture
def worker_on(way):
    def build(store, coord) -> JunctionStoreWorker:
        worker = _worker(store, coord)
        if way == "two phases":
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
    # What stock's readers see is stock's: one entry per group of a hit.
    assert all(entry.group_id < 2 for entry in result.tail_key_boundaries)
    return result.hit_length, list(getattr(result, "junctions", ()))


def test_a_lookup_reports_where_siblings_part(layout, worker_on):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, ())
    sibling = block_hashes[:16] + hashes(10, "sibling")
    assert _lookup(worker_on(store, layout), 26 * 32, sibling) == (0, [512])


def test_a_lookup_server_answers_with_sentinel_entries(layout, worker_on):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, ())
    sibling = block_hashes[:16] + hashes(10, "sibling")
    served = ServedWorker(worker_on(store, layout))
    answer = served.lookup(26 * 32, sibling)
    assert answer.tail_key_boundaries == (TailKeyBoundary(0xFFFFFFFF, 512),)


def test_a_lookup_reports_what_it_cost(layout, worker_on, way):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, ())
    worker, reports = worker_on(store, layout), []
    worker.observe_lookup = reports.append
    store.num_exist_calls = store.num_probed_keys = 0
    worker.lookup(992 + 1, block_hashes)
    # Stock: each of 31 blocks of both groups. In two phases: 31 of full attention,
    # two of the tail at the top, and below it every second block as evidence.
    expected = 62 if way == "all at once" else 31 + 2 + 15
    assert (store.num_exist_calls, store.num_probed_keys) == (1, expected)
    assert (reports[0].num_rpcs, reports[0].num_keys) == (1, expected)


def test_a_lookup_names_the_group_that_lags(layout, worker_on):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, ())
    worker, reports = worker_on(store, layout), []
    worker.observe_lookup = reports.append
    worker.lookup(26 * 32, block_hashes[:16] + hashes(10, "sibling"))
    worker.lookup(992 + 1, block_hashes)
    lagging = [report.lagging_group for report in reports]
    assert lagging == [1, None]


def test_after_the_second_sibling_saved_the_third_hits(layout, worker_on):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, ())
    second = block_hashes[:16] + hashes(15, "second")
    _save(_sender(store, layout), second, 992, (512,))
    third = block_hashes[:16] + hashes(10, "third")
    assert _lookup(worker_on(store, layout), 26 * 32, third) == (512, [])


def test_the_whole_request_is_never_a_junction(layout, worker_on):
    store, block_hashes = KeyStore(), hashes(31)
    _save(_sender(store, layout), block_hashes, 992, ())
    # A prompt of exactly 16 blocks: its last token has to be computed.
    assert _lookup(worker_on(store, layout), 512, block_hashes[:16]) == (0, [480])


def test_a_failing_store_reports_no_hit_and_no_junction(layout, worker_on):
    store = KeyStore()
    store.fails = True
    worker, reports = worker_on(store, layout), []
    worker.observe_lookup = reports.append
    assert _lookup(worker, 992, hashes(31)) == (0, [])
    assert reports[0].outcome is LookupOutcome.ERROR
    assert reports[0].num_rpcs == 1
    # Stock survives this by itself: no fault of ours.
    assert worker.counters.failed_lookups == 0


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


@pytest.mark.parametrize("num_tokens", [0, 1, 31])
def test_a_prompt_shorter_than_a_block_asks_nothing(layout, num_tokens, worker_on):
    store = KeyStore()
    assert _lookup(worker_on(store, layout), num_tokens, hashes(1)) == (0, [])
    assert store.num_exist_calls == 0


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
def test_a_store_that_is_gone_is_an_error_and_not_nothing_stored(layout, how):
    """Mooncake's client answers -900 for every key once its master is gone."""
    store = KeyStore()
    if how == "raises":
        store.fails = True
    else:
        store.error_code = -900
    worker = _worker(store, layout)
    assert _lookup(worker, 992, hashes(31)) == (0, [])
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
    store.num_exist_calls = 0
    sibling = block_hashes[:16] + hashes(10, "sibling")
    _worker(store, layout).lookup(26 * 32, sibling)
    assert debug_lines == [
        f"Lookup of 832 tokens (last block {sibling[-1].hex()[:8]}): hit 0 of at most "
        "800, longest 512; 0-FullAttention-32 512, 1-SlidingWindow-32 0; junctions "
        "512. Why: 1-SlidingWindow-32 has no tail or state above 0."
    ]
    # The answers were there: nothing was asked twice.
    assert store.num_exist_calls == 1


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


def test_without_debug_logging_nothing_is_explained(layout, monkeypatch):
    monkeypatch.setattr(worker_module, "explain", None)
    _worker(KeyStore(), layout).lookup(832, hashes(26))

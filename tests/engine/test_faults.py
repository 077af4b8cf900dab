# SPDX-License-Identifier: Apache-2.0
"""Stores that fail: they cost hits, never an engine and never right outputs.

Wherever a test says that a request ended well, the box has compared all KV that it
read. Each test ends with ``assert_healthy``. What keeps it from failing is named in
its docstring where it is vLLM or Mooncake; ``make mutants`` takes it away, be it theirs
or ours, and the test fails.
"""

import threading
from dataclasses import replace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreRecvingThread,
)

from testbed.box import (
    Box,
    BoxEngine,
    EngineOptions,
    Group,
    Layout,
    Side,
    Stuck,
    WrongKV,
)
from tests.engine.health import (
    Counted,
    assert_healthy,
    assert_nothing_left,
    counters,
)
from tests.engine.layouts import (
    FULL_MAMBA,
    FULL_SWA,
    MLA_SWA_MIXED,
    Tokens,
    siblings,
)
from tests.engine.wire import AnsweringWire
from vllm.junctions.metrics.counted import LOOKUPS
from vllm.junctions.repairs.patience import Patience

RECOMPUTE = EngineOptions(load_failure_policy="recompute")
FULL_ONLY = Layout((Group("full", 16),), hash_tokens=16)
STOCK_WAITS = pytest.mark.xfail(
    raises=Stuck, strict=True, reason="stock waits for memory that it reserves itself"
)


class PutFailures:
    """Counts values that could not be stored, by the connector's own metrics."""

    def __init__(self, engine: BoxEngine) -> None:
        self.num_keys = 0
        thread = engine.worker.connector_worker.kv_send_thread
        record = thread._record_operation_cb

        def counting(**operation):
            if operation["operation"] == "save_put":
                self.num_keys += operation["num_failed_keys"]
            record(**operation)

        thread._record_operation_cb = counting


# Lookup channel


class SilentWorker:
    """Leaves lookups unanswered until told to answer; the clock is the test's.

    It answers after twenty seconds, so that whoever waits for it fails, not hangs.
    """

    def __init__(self, engine: BoxEngine) -> None:
        self.now = 0.0
        self.num_asked = 0
        self.answers = threading.Event()
        worker = engine.worker.connector_worker
        look_up = worker.lookup

        def gated(num_tokens, block_hashes):
            self.num_asked += 1
            # A copy: the frame belongs to a socket that may be gone by then.
            hashes = [bytes(block_hashes[i]) for i in range(len(block_hashes))]
            self.answers.wait(timeout=20)
            return look_up(num_tokens, hashes)

        worker.lookup = gated
        client = engine.scheduler.connector.connector_scheduler.client
        client.lookup_patience = Patience(
            client.lookup_timeout_ms / 1000, lambda: self.now
        )


@pytest.mark.parametrize("lookup_async", [False, True])
def test_a_silent_lookup_channel_costs_hits_and_recovers(lookup_async: bool) -> None:
    options = EngineOptions(extra_config={"lookup_async": lookup_async})
    prompts, shared_tokens = siblings(FULL_SWA)
    tokens = Tokens(seed=1)
    with Box(FULL_SWA, options) as box:
        engine = box.engine()
        box.engine().serve(prompts[0], "A")
        box.engine().serve(prompts[1], "B")
        # Only here: whoever is to get an answer may wait for it on a busy machine.
        client = engine.scheduler.connector.connector_scheduler.client
        client.lookup_timeout_ms = 100
        silent, noted = SilentWorker(engine), Counted(engine)

        # A hit that comes too late, and requests that do not even wait for theirs.
        assert engine.serve(prompts[2], "C").store_hit_tokens == 0
        for index in range(5):
            assert engine.serve(tokens(100), f"other {index}").store_hit_tokens == 0
        assert silent.num_asked == 1
        assert counters(engine)["timed_out_lookups"] == 6

        # The pause is over, the channel is not back yet.
        silent.now += 0.5
        assert engine.serve(tokens(100), "again").store_hit_tokens == 0
        assert engine.serve(tokens(100), "again 2").store_hit_tokens == 0
        assert counters(engine)["timed_out_lookups"] == 8

        silent.answers.set()
        silent.now += 60
        client.lookup_timeout_ms = 60_000
        # The answers for C and "again" come first and are for nobody.
        assert engine.serve(tokens(100), "E").store_hit_tokens == 0
        engine.reset_local_cache()
        assert engine.serve(prompts[3], "D").store_hit_tokens == shared_tokens
        assert silent.num_asked == 4
        assert counters(engine)["malformed_payloads"] == 0
        assert counters(engine)["timed_out_lookups"] == 8
        assert noted[LOOKUPS.name, "timeout"] == 8
        assert_healthy(box, engine)


def test_a_hit_within_a_block_does_not_end_in_an_endless_wait() -> None:
    """Found by ``tests/fuzz``: with nothing to load, stock's receiver gives up."""
    prompt = Tokens()(100)
    with Box(MLA_SWA_MIXED) as box:
        engine = box.engine()
        with AnsweringWire(engine) as wire:
            wire.payload = (4).to_bytes(4, "big")
            assert engine.serve(prompt, "A").finish_reason == "length"
        assert counters(engine)["malformed_payloads"] == 1
        assert_healthy(box, engine)


# Loads


@pytest.mark.parametrize("layout", [FULL_SWA, FULL_MAMBA])
def test_a_tail_evicted_between_lookup_and_load(layout: Layout) -> None:
    """The request recomputes all of it and saves the tail anew.

    That blocks of other groups are not trusted stands on vLLM's scheduler, which
    forgets all computed tokens of a request in ``failed_recving``.
    """
    prompts, shared_tokens = siblings(layout)
    with Box(layout, RECOMPUTE) as box:
        box.engine().serve(prompts[0], "A")
        box.engine().serve(prompts[1], "B")
        engine = box.engine()
        engine.loads.hold()
        engine.add(prompts[2], "C")
        engine.step()
        gone = box.store.evict(
            lambda key: (
                "@group:1@" in key and box.book.prefix_tokens(key) == shared_tokens
            )
        )
        engine.loads.release()
        engine.run()

        assert len(gone) == 1
        served = engine.served["C"]
        assert (served.finish_reason, served.store_hit_tokens) == ("length", 0)
        assert counters(engine)["failed_loads"] == 1
        # The second lookup named the junction, so the tail is back at once.
        assert gone[0] in box.store.values
        assert box.engine().serve(prompts[3], "D").store_hit_tokens == shared_tokens
        assert_healthy(box, engine)


def test_a_failed_load_that_goes_unreported_is_seen_by_the_box(monkeypatch) -> None:
    """Shows what the test above stands on: without the report, KV is wrong."""
    monkeypatch.setattr(
        KVCacheStoreRecvingThread, "_report_load_error", lambda *_args: None
    )
    prompts, _ = siblings(FULL_SWA)
    with Box(FULL_SWA, RECOMPUTE) as box:
        box.engine().serve(prompts[0], "A")
        engine = box.engine()
        box.store.fail_gets(1, count=1)
        engine.add(prompts[0], "again")
        with pytest.raises(WrongKV):
            engine.run()


@pytest.mark.parametrize(
    ("layout", "group"), [(FULL_SWA, 0), (FULL_SWA, 1), (FULL_MAMBA, 1)]
)
def test_a_key_that_exists_but_never_loads(layout: Layout, group: int) -> None:
    prompt = Tokens()(6 * layout.scheduler_block_tokens + 1)
    hit_tokens = 6 * layout.scheduler_block_tokens
    with Box(layout, RECOMPUTE) as box:
        box.engine().serve(prompt, "A")
        engine = box.engine()
        box.store.fails_get = lambda key: f"@group:{group}@" in key
        served = engine.serve(prompt, "B")

        assert (served.finish_reason, served.store_hit_tokens) == ("length", 0)
        assert counters(engine)["failed_loads"] == 2
        box.store.fails_get = lambda _key: False
        engine.reset_local_cache()
        assert engine.serve(prompt, "C").store_hit_tokens == hit_tokens
        assert_healthy(box, engine)


@pytest.mark.parametrize("side", [pytest.param("stock", marks=STOCK_WAITS), "on"])
@pytest.mark.parametrize("layout", [FULL_SWA])
def test_a_large_request_whose_load_failed_does_not_wait_for_itself(
    layout: Layout, side: Side
) -> None:
    """Found by ``make soak``: a failed load's blocks stay reserved in stock."""
    prompt = Tokens()(97)
    num_blocks = 10 * len(layout.groups)
    options = EngineOptions(
        side=side, num_blocks=num_blocks, load_failure_policy="recompute"
    )
    with Box(layout, options) as box:
        box.engine().serve(prompt, "A")
        engine = box.engine()
        box.store.fail_gets(0, count=1)
        engine.add(prompt, "B")
        engine.run()

        assert engine.served["B"].finish_reason == "length"
        assert engine.served["B"].store_hit_tokens == 96
        assert box.faults() == []
        if side == "on":
            assert counters(engine)["failed_loads"] == 1
            assert_nothing_left(engine)


def test_stock_asks_for_a_key_that_never_loads_without_end() -> None:
    """Why the repair ``endless_loads`` is there; when this fails, it may go."""
    prompt = Tokens()(100)
    with Box(FULL_SWA, RECOMPUTE) as box:
        box.engine().serve(prompt, "A")
        engine = box.engine(side="stock")
        box.store.fails_get = lambda key: "@group:1@" in key
        engine.add(prompt, "B")
        for _ in range(50):
            engine.step()
        assert engine.served["B"].finish_reason is None
        box.store.fails_get = lambda _key: False
        engine.run()


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("change", [-4, 8])
def test_a_value_of_the_wrong_size_is_never_loaded_as_kv(
    group: int, change: int
) -> None:
    """Stands on Mooncake, which refuses to read a value into other sizes.

    ``test_real_store.py`` has the same with the real store; without its check the
    box sees wrong KV, see below.
    """
    prompt = Tokens()(97)
    with Box(FULL_SWA, RECOMPUTE) as box:
        box.engine().serve(prompt, "A")
        resize(box, group, change)
        engine = box.engine()
        served = engine.serve(prompt, "B")

        assert (served.finish_reason, served.store_hit_tokens) == ("length", 0)
        assert counters(engine)["failed_loads"] == 2
        box.store.values.clear()
        assert_healthy(box, engine)


def resize(box: Box, group: int, change: int) -> None:
    """Shorten or lengthen, by bytes, what a group has at 96 tokens."""
    (key,) = [
        key
        for key in box.store.values
        if f"@group:{group}@" in key and box.book.prefix_tokens(key) == 96
    ]
    value = box.store.values[key]
    box.store.values[key] = (value + bytes(64))[: len(value) + change]


def test_a_short_value_would_be_wrong_kv() -> None:
    """On stock; here a value of another size never gets as far as a block."""
    prompt = Tokens()(97)
    with Box(FULL_SWA, replace(RECOMPUTE, side="stock")) as box:
        box.engine().serve(prompt, "A")
        resize(box, 1, -4)
        box.store.checks_sizes = False
        engine = box.engine()
        engine.add(prompt, "B")
        with pytest.raises(WrongKV):
            engine.run()


# Saves


def test_a_full_store_skips_saves_and_leaves_hits_alone() -> None:
    """That a failed save is due again stands on vLLM's ``_record_saved``."""
    prompts, shared_tokens = siblings(FULL_SWA)
    tokens = Tokens(seed=1)
    with Box(FULL_SWA) as box:
        engine = box.engine()
        failures = PutFailures(engine)
        engine.serve(prompts[0], "A")
        assert failures.num_keys == 0
        box.store.capacity_bytes = sum(map(len, box.store.values.values()))
        engine.reset_local_cache()

        # B finds the junction, but there is no room for its tail.
        assert engine.serve(prompts[1], "B").finish_reason == "length"
        assert failures.num_keys > 0
        engine.reset_local_cache()
        assert engine.serve(prompts[2], "C").store_hit_tokens == 0
        assert engine.serve(tokens(100), "other").finish_reason == "length"
        # What was there before is as good as ever.
        engine.reset_local_cache()
        assert engine.serve(prompts[0], "A again").store_hit_tokens == 160
        assert_nothing_left(engine)

        box.store.capacity_bytes = None
        engine.serve(prompts[3], "D")
        engine.reset_local_cache()
        assert engine.serve(prompts[2], "E").store_hit_tokens == shared_tokens
        assert_healthy(box, engine)


def test_a_store_that_raises_on_a_save_spoils_no_later_one() -> None:
    """Junction tails of the job that failed are not asked of the next job."""
    prompts, _ = siblings(FULL_SWA)
    prompt = Tokens(seed=1)(161)
    with Box(FULL_SWA) as box:
        box.engine().serve(prompts[0], "A")
        engine = box.engine()
        exists = engine.client.batch_is_exist

        def raising(keys):
            if (
                threading.current_thread()
                is engine.worker.connector_worker.kv_send_thread
            ):
                raise RuntimeError("store gone")
            return exists(keys)

        engine.client.batch_is_exist = raising
        assert engine.serve(prompts[1], "B").finish_reason == "length"
        engine.client.batch_is_exist = exists
        engine.serve(prompt, "other")

        hashes = {key.rpartition("@")[2] for key in box.store.values}
        stored = {
            box.book.prefix_tokens(key)
            for name, key in box.store.puts
            if name == engine.name and "@group:1@" in key
        }
        assert hashes
        # The replay tail alone: a window of two blocks.
        assert stored == {144, 160}
        assert_healthy(box, engine)

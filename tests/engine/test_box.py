# SPDX-License-Identifier: Apache-2.0
"""The box itself: it must be able to see a fault, and it must leave nothing behind."""

import threading

import numpy as np
import pytest

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
from tests.engine.health import assert_nothing_left
from tests.engine.layouts import FULL_SWA, SPARSE_LAYOUTS, Tokens, siblings

all_layouts = pytest.mark.parametrize(
    "layout", SPARSE_LAYOUTS.values(), ids=SPARSE_LAYOUTS
)


@all_layouts
def test_a_replay_on_another_instance_loads_its_own_kv(layout: Layout) -> None:
    prompt = Tokens()(7 * layout.scheduler_block_tokens + 5)
    with Box(layout) as box:
        box.engine().serve(prompt, "first")

        again = box.engine().serve(prompt, "again")

        assert again.store_hit_tokens >= 5 * layout.scheduler_block_tokens
        assert box.faults() == []


@all_layouts
def test_later_siblings_hit_only_with_junctions(layout: Layout) -> None:
    prompts, shared_tokens = siblings(layout, extra_tokens=1)
    hits = {}
    for side in ("stock", "off", "on"):
        with Box(layout, EngineOptions(side=side)) as box:
            hits[side] = [
                box.engine().serve(prompt, str(index)).store_hit_tokens
                for index, prompt in enumerate(prompts)
            ]
            assert box.faults() == []

    block = layout.scheduler_block_tokens
    reach = shared_tokens // block * block - block * layout.drops_eagle_block
    assert hits == {
        "stock": [0, 0, 0, 0],
        "off": [0, 0, 0, 0],
        "on": [0, 0, reach, reach],
    }


def test_wrong_kv_in_the_store_is_reported_and_its_reader_is_stopped() -> None:
    prompt = Tokens()(100)
    with Box(FULL_SWA) as box:
        box.engine().serve(prompt, "first")
        key = next(iter(box.store.values))
        box.store.values[key] = bytes(len(box.store.values[key]))

        assert len(box.faults()) == 1
        reader = box.engine()
        reader.add(prompt, "again")
        with pytest.raises(WrongKV):
            reader.run()


def test_wrong_kv_in_local_memory_stops_its_reader() -> None:
    prompt = Tokens()(100)
    with Box(FULL_SWA, EngineOptions(max_batched_tokens=48)) as box:
        engine = box.engine()
        engine.add(prompt, "a")
        engine.step()
        engine.runner.slots[:] = np.uint64(1)
        with pytest.raises(WrongKV):
            engine.step()


@pytest.mark.xfail(
    strict=True,
    raises=WrongKV,
    reason="Stock lets a request hit, within a block, what another one computes in "
    "the same step, and copies that block before it is written.",
)
@pytest.mark.parametrize("side", ["stock", "on"])
def test_a_hit_within_a_block_is_not_copied_before_it_is_written(side: Side) -> None:
    """Found by the law *nothing wrong*, once in 42,000 examples."""
    layout = Layout(
        (Group("full", 4), Group("mamba", 4)), hash_tokens=2, drops_eagle_block=True
    )
    tokens = Tokens()
    shared = tokens(2)
    with Box(layout, EngineOptions(side=side)) as box:
        engine = box.engine()
        engine.serve(shared + tokens(2), "leaves a state within a block")
        twice = shared + tokens(4)
        engine.add(twice, "computes a block")
        engine.serve(twice, "hits half of it in the same step")


def test_closing_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with Box(FULL_SWA) as box:
        box.engine().serve(Tokens()(100), "a")
        assert len(threading.enumerate()) > len(before)

    assert set(threading.enumerate()) <= before


def loaded_requests_that_fill_the_cache(box: Box, side: Side) -> BoxEngine:
    """Return an engine with two requests that find all of their prompt in the store."""
    prompt = Tokens()(21)
    box.engine().serve(prompt, "first")
    reader = box.engine(side=side)
    reader.add(prompt, "one")
    reader.add(prompt, "other")
    return reader


TIGHT = Layout(
    (Group("full", 2), Group("swa", 4, 2), Group("swa", 4, 10), Group("full", 2)),
    hash_tokens=2,
)
TIGHT_OPTIONS = EngineOptions(num_blocks=51, max_batched_tokens=4, max_requests=4)


def test_stocks_loaded_requests_wait_for_each_others_memory() -> None:
    """vLLM's own deadlock: aborting one frees the other."""
    with Box(TIGHT, TIGHT_OPTIONS) as box:
        reader = loaded_requests_that_fill_the_cache(box, "stock")
        with pytest.raises(Stuck):
            reader.run()
        assert reader.waits_for_memory

        reader.abort_last()
        reader.run()

        assert not reader.waits_for_memory
        assert reader.served["one"].store_hit_tokens == 20
        assert reader.served["one"].finish_reason == "length"


def test_loaded_requests_do_not_wait_for_each_others_memory() -> None:
    """Found by ``make soak``; the second gives its blocks back, and loads again."""
    with Box(TIGHT, TIGHT_OPTIONS) as box:
        reader = loaded_requests_that_fill_the_cache(box, "on")
        reader.run()

        assert [one.finish_reason for one in reader.served.values()] == ["length"] * 2
        assert [one.hit_tokens for one in reader.served.values()] == [20, 20]
        assert box.faults() == []
        assert_nothing_left(reader)

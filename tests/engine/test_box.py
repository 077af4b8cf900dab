# SPDX-License-Identifier: Apache-2.0
"""The box itself: it must be able to see a fault, and it must leave nothing behind."""

import threading

import numpy as np
import pytest

from benchmarks.testbed.box import Box, EngineOptions, Group, Layout, Stuck, WrongKV
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


def test_closing_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with Box(FULL_SWA) as box:
        box.engine().serve(Tokens()(100), "a")
        assert len(threading.enumerate()) > len(before)

    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("side", ["stock", "on"])
def test_loaded_requests_that_wait_for_each_others_memory_are_told_apart(side) -> None:
    """vLLM's own deadlock (README, Known limits): aborting one frees the other."""
    layout = Layout(
        (Group("full", 2), Group("swa", 4, 2), Group("swa", 4, 10), Group("full", 2)),
        hash_tokens=2,
    )
    prompt = Tokens()(21)
    options = EngineOptions(
        side=side, num_blocks=51, max_batched_tokens=4, max_requests=4
    )
    with Box(layout, options) as box:
        box.engine().serve(prompt, "first")
        reader = box.engine()
        reader.add(prompt, "one")
        reader.add(prompt, "other")
        with pytest.raises(Stuck):
            reader.run()
        assert reader.waits_for_memory

        reader.abort_last()
        reader.run()

        assert not reader.waits_for_memory
        assert reader.served["one"].store_hit_tokens == 20
        assert reader.served["one"].finish_reason == "length"
        assert box.faults() == []

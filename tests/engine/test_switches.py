# SPDX-License-Identifier: Apache-2.0
"""Each product on its own: how lookups ask, what is repaired, and junctions alone."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from vllm.v1.core.sched.interface import PauseState

from benchmarks import seed_table
from testbed.box import Box, BoxEngine, EngineOptions, Side, Stuck
from tests.engine.health import counters
from tests.engine.layouts import FULL_SWA, Tokens, siblings
from vllm.junctions.repairs.late_loads.store import LandingStore
from vllm.junctions.repairs.short_puts import ShortPuts

ALONE = {"junctions_lookup": "at_once", "junctions_repairs": False}


@pytest.mark.parametrize("diverge_tokens", [row[0] for row in seed_table.EXPECTED])
@pytest.mark.parametrize(
    "settings",
    [ALONE, {"junctions_lookup": "at_once"}, {"junctions_repairs": False}],
    ids=["alone", "with repairs", "with two-phase lookups"],
)
def test_the_seed_table_needs_junctions_alone(diverge_tokens: int, settings) -> None:
    tail_tokens = seed_table.TAIL_TOKENS
    rows = {
        "junctions": seed_table.run_side("on", diverge_tokens, tail_tokens, settings)
    }
    series = seed_table.Series(tail_tokens, diverge_tokens, rows)
    assert seed_table.failures([series]) == []


# Lookups


def _asked(side: Side, **settings) -> list[list[str]]:
    """Return the keys of each call that a sibling's lookup makes."""
    prompts, _ = siblings(FULL_SWA)
    calls: list[list[str]] = []
    with Box(FULL_SWA, EngineOptions(side=side, extra_config=settings)) as box:
        engine = box.engine()
        engine.serve(prompts[0], "A")
        client = engine.client
        is_exist = client.batch_is_exist

        def noting(keys: list[str]) -> list[int]:
            if (
                threading.current_thread()
                is engine.worker.connector_worker.lookup_server.thread
            ):
                calls.append(keys)
            return is_exist(keys)

        client.batch_is_exist = noting
        engine.reset_local_cache()
        engine.serve(prompts[1], "B")
    return calls


def test_at_once_asks_what_stock_asks_and_two_phases_less() -> None:
    stock = _asked("stock")
    assert len(stock) == 1
    assert _asked("on", junctions_lookup="at_once") == stock
    two_phase = [key for call in _asked("on") for key in call]
    assert set(two_phase) < set(stock[0])


# Repairs


def _serve_embeddings(engine: BoxEngine) -> None:
    """A request of prompt embeddings is scheduled."""
    prompt = Tokens()(100)
    request = engine._make_request(
        prompt, "e", 1, prompt_embeds=torch.zeros(len(prompt), 8)
    )
    request.prompt_token_ids = None
    engine.scheduler.add_request(request)
    engine.scheduler.schedule()


def _preempt_and_resume(engine: BoxEngine) -> None:
    """A request is preempted and back in one pass."""
    engine.add(Tokens()(100), "a", max_tokens=20)
    for _ in range(6):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.scheduler.reset_prefix_cache(True, reset_connector=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()


_FAULTS: dict[str, Callable[[BoxEngine], None]] = {
    "prompt_embeds": _serve_embeddings,
    "same_pass_resume": _preempt_and_resume,
}


@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize(
    ("setting", "mended"),
    [
        (True, set(_FAULTS)),
        (False, set()),
        (["prompt_embeds"], {"prompt_embeds"}),
        (["loads_wait", "same_pass_resume"], {"same_pass_resume"}),
        ("stock", set()),
    ],
)
def test_what_is_named_is_mended_and_the_rest_is_as_on_stock(
    fault: str, setting, mended: set[str]
) -> None:
    options = EngineOptions(extra_config={"junctions_repairs": setting})
    if setting == "stock":
        options = EngineOptions(side="stock")
    with Box(FULL_SWA, options) as box:
        # Their hooks are in the process, for another engine.
        box.engine(side="on", extra_config={})
        engine = box.engine()
        if fault in mended:
            _FAULTS[fault](engine)
        else:
            with pytest.raises((AssertionError, TypeError, Stuck)):
                _FAULTS[fault](engine)


@pytest.mark.parametrize("setting", [True, False, ["silent_lookups"], ["loads_wait"]])
def test_lookups_time_out_where_that_repair_is_on(setting) -> None:
    """Elsewhere an answer counts however late it is."""
    settings = {"junctions_repairs": setting, "junctions_lookup_timeout_ms": 50}
    prompts, shared_tokens = siblings(FULL_SWA)
    with Box(FULL_SWA) as box:
        for prompt in prompts[:2]:
            box.engine().serve(prompt, "stored")
        engine = box.engine(extra_config=settings)
        worker = engine.worker.connector_worker
        look_up = worker.lookup

        def late(num_tokens, block_hashes):
            time.sleep(0.5)
            return look_up(num_tokens, block_hashes)

        worker.lookup = late
        hit_tokens = engine.serve(prompts[2], "C").store_hit_tokens
        times_out = setting in (True, ["silent_lookups"])
        assert hit_tokens == (0 if times_out else shared_tokens)
        assert counters(engine)["timed_out_lookups"] == times_out


@pytest.mark.parametrize(
    ("setting", "puts_are_split", "loads_land"),
    [
        (True, True, True),
        (False, False, False),
        (["short_puts"], True, False),
        (["late_loads"], False, True),
    ],
)
def test_transfers_are_mended_where_named(
    setting, puts_are_split: bool, loads_land: bool
) -> None:
    options = EngineOptions(extra_config={"junctions_repairs": setting})
    with Box(FULL_SWA, options) as box:
        worker = box.engine().worker.connector_worker
        assert isinstance(worker.kv_send_thread.store, ShortPuts) == puts_are_split
        for thread in worker.kv_recv_threads:
            assert isinstance(thread.store, LandingStore) == loads_land


@pytest.mark.parametrize("setting", [True, False])
def test_repairs_that_are_off_leave_nothing_on_the_stores_scheduler(setting) -> None:
    with Box(FULL_SWA) as box:
        # Their hooks are in the process, for another engine.
        box.engine()
        engine = box.engine(extra_config={"junctions_repairs": setting})
        engine.serve(Tokens()(100), "a")
        engine.add(Tokens()(100), "b")
        engine.scheduler.schedule()
        side = engine.scheduler.connector.connector_scheduler
        traces = {"_endless_loads_counts", "_same_pass_got_blocks"} & set(vars(side))
        assert bool(traces) == setting

# SPDX-License-Identifier: Apache-2.0
"""Faults of stock that are mended, and features that the mending must leave alone."""

import pytest
import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from testbed.box import Box, EngineOptions, Side, Stuck
from tests.engine.health import assert_nothing_left
from tests.engine.layouts import FULL_MAMBA_EAGLE, FULL_SWA, Tokens, siblings


@pytest.mark.parametrize("side", ["stock", "on"])
def test_waiting_sessions_keep_their_context_however_long_a_save_takes(
    side: Side,
) -> None:
    tokens = Tokens()
    with Box(FULL_SWA, EngineOptions(side=side)) as box:
        engine = box.engine()
        engine.saves.hold()
        for name in ("one", "two"):
            engine.add(tokens(100), name, resumable=True)
        for _ in range(25):
            engine.step()
        session = engine.request("two")
        assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        assert session.num_computed_tokens == 100

        update = engine._make_request(tokens(10), "two", 1, resumable=True)
        engine.scheduler.add_request(update)
        assert len(session._all_token_ids) == 110
        engine.saves.release()


@pytest.mark.parametrize(
    "side",
    [
        pytest.param(
            "stock",
            marks=pytest.mark.xfail(
                strict=True, raises=(TypeError, Stuck), reason="vLLM's engine dies"
            ),
        ),
        "on",
    ],
)
@pytest.mark.parametrize("loads", [False, True])
def test_a_request_that_is_preempted_and_back_in_one_pass_ends(
    side: Side, loads: bool
) -> None:
    """What ``/pause?mode=keep`` with ``clear_cache`` does to a request that runs."""
    with Box(FULL_SWA, EngineOptions(side=side)) as box:
        engine = box.engine()
        prompt = Tokens()(100)
        if loads:
            box.engine().serve(prompt, "stored")
        engine.add(prompt, "a", max_tokens=20)
        for _ in range(6):
            engine.step()
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert engine.scheduler.reset_prefix_cache(True, reset_connector=not loads)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.run()
        assert engine.served["a"].finish_reason == "length"
        assert box.faults() == []
        if side == "on":
            assert_nothing_left(engine)


@pytest.mark.parametrize(
    "side",
    [
        pytest.param(
            "stock",
            marks=pytest.mark.xfail(
                strict=True, raises=AssertionError, reason="vLLM's engine dies"
            ),
        ),
        "on",
    ],
)
def test_prompt_embeddings_alone_are_served(side: Side) -> None:
    prompt = Tokens()(100)
    with Box(FULL_SWA, EngineOptions(side=side)) as box:
        engine = box.engine()
        engine.add(prompt, "beside", max_tokens=3)
        embeddings = torch.zeros(100, 8)
        request = engine._make_request(prompt, "e", 1, prompt_embeds=embeddings)
        request.prompt_token_ids = None
        engine.served["e"] = engine.served["beside"].__class__(
            "e", engine.served["beside"].sequence
        )
        engine._requests["e"] = request
        engine.scheduler.add_request(request)
        engine.scheduler.schedule()
        assert request.status == RequestStatus.RUNNING


def test_a_load_that_fails_after_its_request_was_aborted_leaves_nothing() -> None:
    prompts, _ = siblings(FULL_SWA)
    options = EngineOptions(load_failure_policy="recompute")
    with Box(FULL_SWA, options) as box:
        box.engine().serve(prompts[0], "A")
        box.engine().serve(prompts[1], "B")
        engine = box.engine()
        engine.loads.hold()
        engine.add(prompts[2], "C")
        engine.step()
        engine.abort_last()
        engine.step()
        box.store.fails_get = lambda key: True
        engine.loads.release()
        engine.run()
        for _ in range(3):
            engine.step()
        box.store.fails_get = lambda key: False
        assert_nothing_left(engine)


@pytest.mark.parametrize("extra_tokens", [1, 9])
def test_mamba_siblings_of_one_pass_hit_no_less_than_on_stock(
    extra_tokens: int,
) -> None:
    """Chunk stops of local and store junctions do not stack up."""
    prompts, _ = siblings(FULL_MAMBA_EAGLE, extra_tokens=extra_tokens)
    tokens = Tokens(seed=5)
    block = FULL_MAMBA_EAGLE.scheduler_block_tokens
    shared = prompts[0][:-1]
    outcomes = {}
    for side in ("stock", "on"):
        with Box(FULL_MAMBA_EAGLE, EngineOptions(side=side)) as box:
            box.engine().serve(prompts[0], "A")
            engine = box.engine()
            for index in range(6):
                part = shared[: len(shared) // 2] + tokens(6 * block)
                engine.add(part, str(index))
            engine.run()
            hits = [one.hit_tokens for one in engine.served.values()]
            outcomes[side] = hits, sum(1 for s in engine.steps if s.block_tables)
    stock_hits, _ = outcomes["stock"]
    our_hits, _ = outcomes["on"]
    assert all(
        ours >= theirs for ours, theirs in zip(our_hits, stock_hits, strict=True)
    )

# SPDX-License-Identifier: Apache-2.0
"""Mamba in align mode: a state can be kept only where a prefill chunk ends."""

from itertools import accumulate

import pytest

from testbed.box import Box, BoxEngine, Layout
from tests.engine.layouts import (
    FULL_MAMBA,
    FULL_MAMBA_EAGLE,
    FULL_MAMBA_PARTIAL,
    Tokens,
    siblings,
)

MAMBA_GROUP = 1


def chunk_ends(engine: BoxEngine, request_id: str) -> list[int]:
    """Return where the chunks of a request's prefill ended, in tokens."""
    served = engine.served[request_id]
    chunks = [
        step.num_scheduled_tokens[request_id]
        for step in engine.steps
        if request_id in step.num_scheduled_tokens
    ]
    return list(accumulate(chunks, initial=served.hit_tokens))[1:]


def stored_states(box: Box) -> set[int]:
    """Return at how many tokens the store holds Mamba states."""
    return {tokens for group, tokens, _ in box.stored() if group == MAMBA_GROUP}


@pytest.mark.parametrize("layout", [FULL_MAMBA, FULL_MAMBA_PARTIAL])
def test_prefill_stops_at_a_junction_and_its_state_is_stored(layout: Layout) -> None:
    prompts, shared_tokens = siblings(layout)
    with Box(layout) as box:
        box.engine().serve(prompts[0], "A")
        before = stored_states(box)
        finder = box.engine()
        finder.serve(prompts[1], "B")

        assert shared_tokens not in before
        assert shared_tokens in chunk_ends(finder, "B")
        assert shared_tokens in stored_states(box)
        assert box.engine().serve(prompts[2], "C").store_hit_tokens == shared_tokens
        assert box.faults() == []


def test_eagle_stops_at_both_positions() -> None:
    prompts, shared_tokens = siblings(FULL_MAMBA_EAGLE, extra_tokens=1)
    block = FULL_MAMBA_EAGLE.scheduler_block_tokens
    upper = shared_tokens // block * block - block
    with Box(FULL_MAMBA_EAGLE) as box:
        box.engine().serve(prompts[0], "A")
        finder = box.engine()
        finder.serve(prompts[1], "B")

        assert {upper - block, upper} <= set(chunk_ends(finder, "B"))
        assert {upper - block, upper} <= stored_states(box)
        # One that parts a block earlier lands on the lower position.
        early = prompts[0][: upper + 1] + Tokens(9)(4 * block)
        assert box.engine().serve(early, "E").store_hit_tokens == upper - block
        assert box.engine().serve(prompts[2], "C").store_hit_tokens == upper


def test_a_local_and_a_store_junction_in_one_request() -> None:
    block = FULL_MAMBA.scheduler_block_tokens
    tokens = Tokens()
    trunk = tokens(8 * block)
    with Box(FULL_MAMBA) as box:
        # This instance's cache knows a prefix of three blocks, the store of six.
        finder = box.engine()
        finder.client.saves.hold()
        finder.add(trunk[: 3 * block] + tokens(3 * block), "near")
        finder.run_requests()
        box.engine().serve(trunk[: 6 * block] + tokens(3 * block), "far")
        finder.add(trunk + tokens(3 * block), "both")
        finder.run_requests()
        finder.client.saves.release()
        finder.run()

        assert {3 * block, 6 * block} <= set(chunk_ends(finder, "both"))
        assert {3 * block, 6 * block} <= stored_states(box)
        near = box.engine().serve(trunk[: 3 * block] + tokens(40), "near sibling")
        far = box.engine().serve(trunk[: 6 * block] + tokens(40), "far sibling")
        assert (near.store_hit_tokens, far.store_hit_tokens) == (3 * block, 6 * block)
        assert box.faults() == []


@pytest.mark.parametrize("layout", [FULL_MAMBA, FULL_MAMBA_EAGLE, FULL_MAMBA_PARTIAL])
def test_states_are_never_in_a_store_mask(layout: Layout) -> None:
    block = layout.scheduler_block_tokens
    with Box(layout) as box:
        coordinator = box.engine().worker.connector_worker.coord
        masks = coordinator.store_mask(8 * block, boundaries=(2 * block, 5 * block))

    assert masks[MAMBA_GROUP] == [False] * 8


@pytest.mark.parametrize("layout", [FULL_MAMBA, FULL_MAMBA_PARTIAL])
def test_small_chunks_change_nothing(layout: Layout) -> None:
    prompts, shared_tokens = siblings(layout)
    block = layout.scheduler_block_tokens
    for chunk_tokens in (block // 2, block, 2 * block + 3):
        with Box(layout) as box:
            hits = []
            for index, prompt in enumerate(prompts):
                engine = box.engine(max_batched_tokens=chunk_tokens)
                hits.append(engine.serve(prompt, str(index)).store_hit_tokens)
            assert hits == [0, 0, shared_tokens, shared_tokens]
            assert box.faults() == []

# SPDX-License-Identifier: Apache-2.0
"""Faults that users of such systems have met, made to happen small.

Named by their essence; the numbers are those of the table in ``tests/README.md``.
"""

import logging

import pytest

from benchmarks import seed_table
from testbed.box import (
    Box,
    BoxEngine,
    EngineOptions,
    Group,
    Layout,
    Side,
)
from tests.engine.layouts import (
    FULL_MAMBA,
    FULL_MAMBA_PARTIAL,
    FULL_SWA,
    FULL_SWA_EAGLE,
    Tokens,
    siblings,
)

# Blocks of the drafter's window are smaller than a scheduler block, so a chunk can
# end between a proof block and the end of its scheduler block.
SMALL_PROOF = Layout(
    (Group("full", 32), Group("swa", 8, 9, eagle=True)),
    hash_tokens=8,
    drops_eagle_block=True,
)


@pytest.fixture(autouse=True)
def _no_errors_are_logged(caplog: pytest.LogCaptureFixture):
    """Transfer threads swallow exceptions; their log is all that is left of them."""
    yield
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert not errors, errors[0].getMessage()


def hits(box: Box, prompts: list[list[int]]) -> list[int]:
    """Serve each prompt on an instance of its own; return store hits in tokens."""
    return [
        box.engine().serve(prompt, f"hit-{index}").store_hit_tokens
        for index, prompt in enumerate(prompts)
    ]


# 1


def test_01_blocks_of_a_waiting_save_are_not_given_to_another_request() -> None:
    tokens = Tokens()
    with Box(FULL_SWA, EngineOptions(num_blocks=24)) as box:
        engine = box.engine()
        engine.client.saves.hold()
        engine.add(tokens(160), "a")
        engine.run_requests()
        engine.add(tokens(160), "b")
        for _ in range(3):
            engine.step()
        engine.client.saves.release()
        engine.run()

        assert box.faults() == []
        assert engine.served["b"].finish_reason == "length"


def test_01_a_preempted_save_stores_nothing_of_the_next_request() -> None:
    tokens = Tokens()
    with Box(FULL_SWA, EngineOptions(num_blocks=24, max_batched_tokens=64)) as box:
        engine = box.engine()
        engine.client.saves.hold()
        engine.add(tokens(160), "a")
        engine.step()
        engine.step()
        engine.preempt()
        engine.add(tokens(160), "b")
        for _ in range(3):
            engine.step()
        engine.client.saves.release()
        engine.run()

        assert box.faults() == []


COUNTS_PADDING = pytest.mark.xfail(
    strict=True,
    reason="Stock counts the padding rows of a speculative step as tokens to save.",
)


@pytest.mark.parametrize("side", [pytest.param("stock", marks=COUNTS_PADDING), "on"])
def test_01_padding_rows_of_a_speculative_step_are_not_stored(side: Side) -> None:
    tokens = Tokens()
    layout = Layout(
        (Group("full", 2), Group("swa", 2, 3)), hash_tokens=2, drops_eagle_block=True
    )
    with Box(layout, EngineOptions(side=side)) as box:
        engine = box.engine()
        engine.add(tokens(1), "decoding", max_tokens=2)
        engine.step()
        engine.client.saves.hold()
        # One token and one row of padding reach the end of a block.
        engine.add(tokens(1), "padded")
        engine.run_requests()
        engine.client.saves.release()
        engine.run()

        assert box.faults() == []


# 2


@pytest.mark.parametrize("layout", [FULL_MAMBA, FULL_MAMBA_PARTIAL])
def test_02_a_state_is_stored_as_it_was_at_its_boundary(layout: Layout) -> None:
    prompts, _ = siblings(layout)
    with Box(layout) as box:
        box.engine().serve(prompts[0], "A")
        engine = box.engine()
        engine.client.saves.hold()
        # Decoding goes on in place, over three more blocks, while saves wait.
        engine.add(prompts[1], "B", max_tokens=3 * layout.scheduler_block_tokens)
        engine.run_requests()
        engine.client.saves.release()
        engine.run()

        assert any("@group:1@" in key for key in box.store.values)
        assert box.faults() == []
        assert hits(box, [prompts[2]])[0] > 0


# 3


def test_03_a_null_block_is_never_stored() -> None:
    block = SMALL_PROOF.scheduler_block_tokens
    tokens = Tokens()
    shared = tokens(5 * block)
    with Box(SMALL_PROOF) as box:
        box.engine().serve(shared + tokens(4 * block), "A")
        # Each chunk ends in the middle of a scheduler block: when the save that
        # covers a proof block is due, the window has moved on.
        finder = box.engine(max_batched_tokens=block // 2 + 8)
        finder.serve(shared + tokens(4 * block), "B")

        assert box.faults() == []


# 4


@pytest.mark.parametrize("layout", [FULL_SWA, FULL_SWA_EAGLE, FULL_MAMBA])
def test_04_a_resumed_request_saves_all_of_its_prefix(layout: Layout) -> None:
    prompts, shared_tokens = siblings(layout, extra_tokens=1)
    block = layout.scheduler_block_tokens
    with Box(layout, EngineOptions(max_batched_tokens=2 * block)) as box:
        box.engine().serve(prompts[0], "A")
        engine = box.engine()
        engine.add(prompts[1], "B", max_tokens=block)
        while engine.request("B").num_output_tokens < block // 2:
            engine.step()
        engine.preempt()
        engine.reset_local_cache()
        engine.run()

        assert box.faults() == []
        reach = shared_tokens // block * block - block * layout.drops_eagle_block
        assert hits(box, [prompts[2], prompts[3]]) == [reach, reach]


def test_04_junctions_survive_preemption() -> None:
    """A save that failed is made good after the resume, when nothing reports it.

    By then the request's own full-attention blocks are in the store, so the lookup
    names a later position.
    """
    prompts, shared_tokens = siblings(FULL_SWA)
    block = FULL_SWA.scheduler_block_tokens
    with Box(FULL_SWA, EngineOptions(max_batched_tokens=2 * block)) as box:
        box.engine().serve(prompts[0], "A")
        engine = box.engine()
        engine.add(prompts[1], "B")
        box.store.fails_put = lambda key: "@group:1@" in key
        while engine.request("B").num_computed_tokens < shared_tokens + 2 * block:
            engine.step()
        box.store.fails_put = lambda _key: False
        engine.preempt()
        engine.run()

        assert hits(box, [prompts[2]]) == [shared_tokens]
        assert box.faults() == []


# 5


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("group", [0, 1])
def test_05_a_failed_get_of_one_group_costs_one_request_at_most(
    policy: str, group: int
) -> None:
    prompts, shared_tokens = siblings(FULL_SWA)
    with Box(FULL_SWA, EngineOptions(load_failure_policy=policy)) as box:
        hits(box, prompts[:2])
        reader = box.engine()
        box.store.fail_gets(group, count=1)
        failed = reader.serve(prompts[2], "failing")

        assert failed.store_hit_tokens == shared_tokens
        assert failed.finish_reason == ("length" if policy == "recompute" else "error")
        assert reader.serve(prompts[3], "next").finish_reason == "length"
        assert box.faults() == []


# 6, 7, 8, 10


def test_06_two_groups_of_one_spec_of_which_one_is_flagged() -> None:
    series = seed_table.run_series(160, seed_table.TAIL_TOKENS)

    assert [row.store_hit_tokens for row in series.rows["junctions"]] == [
        *(0, 0, 3840, 3840, 5120)
    ]


@pytest.mark.parametrize("layout", [FULL_SWA_EAGLE, SMALL_PROOF])
def test_07_08_what_is_stored_is_what_is_looked_up_at_every_length(
    layout: Layout,
) -> None:
    block = layout.scheduler_block_tokens
    tokens = Tokens()
    with Box(layout) as box:
        writer, reader = box.engine(), box.engine()
        for length in range(2 * block, 4 * block + 2):
            prompt = tokens(length)
            writer.serve(prompt, f"w{length}")
            again = reader.serve(prompt, f"r{length}").store_hit_tokens
            assert again == length // block * block - block, length
            longer = reader.serve(prompt + tokens(2 * block), f"l{length}")
            assert longer.hit_tokens >= again, length
        assert box.faults() == []


@pytest.mark.parametrize("layout", [FULL_SWA_EAGLE, SMALL_PROOF])
def test_07_08_siblings_hit_whatever_they_share_past_the_junction(
    layout: Layout,
) -> None:
    block = layout.scheduler_block_tokens
    proof = min(group.block_tokens for group in layout.groups if group.eagle)
    for extra_tokens in range(0, block, 3):
        prompts, shared_tokens = siblings(layout, extra_tokens=extra_tokens)
        reach = (shared_tokens - proof) // block * block
        with Box(layout) as box:
            assert hits(box, prompts)[2:] == [reach, reach], extra_tokens
            assert box.faults() == []


@pytest.mark.xfail(
    strict=True,
    reason="Saves are due per scheduler block; a proof block of a short window can be "
    "gone by then. Stock loses its own replay tails in the same way.",
)
@pytest.mark.parametrize("side", ["stock", "on"])
def test_07_08_a_proof_block_is_saved_wherever_chunks_end(side: Side) -> None:
    prompts, shared_tokens = siblings(SMALL_PROOF, extra_tokens=8)
    block = SMALL_PROOF.scheduler_block_tokens
    options = EngineOptions(side=side, max_batched_tokens=block // 2)
    with Box(SMALL_PROOF, options) as box:
        found = hits(box, prompts)
        assert hits(box, prompts[:1]) == [(len(prompts[0]) // block - 1) * block]
        assert side == "stock" or found[2] == shared_tokens // block * block


def test_10_three_groups_that_drop_a_block_lose_one_block_in_all() -> None:
    layout = Layout(
        (Group("full", 16), Group("swa", 16, 20), Group("swa", 8, 30)),
        hash_tokens=8,
        drops_eagle_block=True,
    )
    prompts, shared_tokens = siblings(layout, extra_tokens=15)
    with Box(layout) as box:
        reach = shared_tokens // 16 * 16 - 16
        assert hits(box, prompts) == [0, 0, reach, reach]


# 9


def test_09_partial_hits_have_a_key_in_every_group() -> None:
    layout = FULL_MAMBA_PARTIAL
    for extra_tokens in range(0, layout.scheduler_block_tokens, 8):
        prompts, shared_tokens = siblings(layout, extra_tokens=extra_tokens)
        with Box(layout) as box:
            found = hits(box, prompts)[2:]
            assert box.faults() == []
            # A position between two blocks is as good as the block below.
            assert min(found) >= shared_tokens // 32 * 32
            assert max(found) <= shared_tokens
            for engine in box.engines:
                assert engine.worker.connector_worker.counters.failed_lookups == 0


# 11


@pytest.mark.parametrize("group", [0, 1])
def test_11_one_group_loses_its_local_blocks(group: int) -> None:
    prompts, shared_tokens = siblings(FULL_SWA)
    with Box(FULL_SWA) as box:
        engine = box.engine()
        engine.serve(prompts[0], "A")
        engine.serve(prompts[1], "B")
        lose_local_blocks(engine, group)
        engine.client.loads.release()

        assert engine.serve(prompts[2], "C").hit_tokens == shared_tokens
        assert box.faults() == []


def lose_local_blocks(engine: BoxEngine, group: int) -> None:
    pool = engine.scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        key = block.block_hash
        if key is not None and int.from_bytes(key[-4:], "big") == group:
            pool._maybe_evict_cached_block(block)


# 14


@pytest.mark.parametrize("tp_size", [2, 4])
def test_14_a_sharded_state_counts_only_with_every_shard(tp_size: int) -> None:
    layout = Layout((Group("mla", 16), Group("mamba", 16)), hash_tokens=16)
    prompts, shared_tokens = siblings(layout)
    with Box(layout) as box:
        hits(box, prompts[:2])
        engine = box.engine()
        worker = engine.worker.connector_worker
        worker.tp_size = tp_size
        worker._group_tp_replication_factors = (
            worker._compute_group_tp_replication_factors()
        )
        worker._init_lookup_key_prefixes()
        worker._plan_lookups()

        assert worker._group_tp_replication_factors == (tp_size, 1)
        assert engine.serve(prompts[2], "C").store_hit_tokens == 0
        for key in list(box.store.values):
            for rank in range(1, tp_size):
                shard = key.replace("@tp_rank:0", f"@tp_rank:{rank}")
                if "@group:1@" in key:
                    box.store.values[shard] = box.store.values[key]
        engine.reset_local_cache()
        assert engine.serve(prompts[3], "D").store_hit_tokens == shared_tokens


# 15


def test_15_a_second_turn_finds_a_junction_where_the_first_ended() -> None:
    block = FULL_SWA.scheduler_block_tokens
    tokens = Tokens()
    options = EngineOptions(extra_config={"save_decode_cache": True})
    with Box(FULL_SWA, options) as box:
        first = box.engine().serve(tokens(4 * block), "first", max_tokens=3 * block + 1)
        turn = list(first.sequence.tokens)[: 7 * block]

        second, third = hits(box, [turn + tokens(3 * block) for _ in range(2)])

        # Stock keeps a tail where a replay of the first prompt resumes.
        assert second == 3 * block
        assert third == 7 * block
        assert box.faults() == []

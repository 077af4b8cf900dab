# SPDX-License-Identifier: Apache-2.0
"""First siblings hit where a client declared, or lookups taught, that they part."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.seed_table import LAYOUT as DEEPSEEK_V4
from testbed.box import Box, BoxEngine, EngineOptions, Layout
from tests.engine.health import Counted
from tests.engine.layouts import (
    FULL_MAMBA,
    FULL_MAMBA_EAGLE,
    FULL_SWA,
    FULL_SWA_EAGLE,
    SPARSE_LAYOUTS,
    Tokens,
)
from vllm.junctions.core.request import junctions_of, shared_prefix_boundaries
from vllm.junctions.metrics import counted
from vllm.junctions.metrics.counted import (
    DECLARED_IGNORED,
    EXTRA_BYTES,
    FIRST_SIBLING_TOKENS,
    FIRST_SIBLINGS,
    FOUND,
    TAIL_BYTES,
)

PREFIX_TOKENS = 3840
PREDICT = {"junctions_predict": 1}


def declare(*positions: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"junctions": list(positions)}}


@pytest.mark.parametrize(("past", "hit"), [(8, 3584), (160, 3840)])
@pytest.mark.parametrize("declared", ["exactly", "a block below the end"])
def test_the_first_sibling_hits_where_a_later_one_would(
    past: int, hit: int, declared: str
) -> None:
    """With EAGLE a hit leaves room for the block that proves it."""
    tokens = Tokens()
    shared = tokens(PREFIX_TOKENS + past)
    position = len(shared) if declared == "exactly" else hit + 64
    with Box(DEEPSEEK_V4) as box:
        box.engine().serve(shared + tokens(1400), "A", **declare(position))
        first = box.engine().serve(shared + tokens(600), "B")
        assert first.store_hit_tokens == hit
        assert box.engine().serve(shared + tokens(607), "C").store_hit_tokens == hit
        assert box.faults() == []


def test_the_end_of_a_whole_block_is_a_hit_without_eagle_only() -> None:
    tokens = Tokens()
    shared = tokens(PREFIX_TOKENS)
    with Box(DEEPSEEK_V4) as box:
        box.engine().serve(shared + tokens(1400), "A", **declare(PREFIX_TOKENS))
        hit = box.engine().serve(shared + tokens(600), "B").store_hit_tokens
        assert hit == PREFIX_TOKENS - 256
    with Box(FULL_SWA) as box:
        box.engine().serve(shared + tokens(1400), "A", **declare(PREFIX_TOKENS))
        hit = box.engine().serve(shared + tokens(600), "B").store_hit_tokens
        assert hit == PREFIX_TOKENS


@pytest.mark.parametrize("name", SPARSE_LAYOUTS)
def test_every_layout_keeps_a_declared_position(name: str) -> None:
    layout, tokens = SPARSE_LAYOUTS[name], Tokens()
    block = layout.scheduler_block_tokens
    shared = tokens(6 * block)
    expected = (6 - layout.drops_eagle_block) * block
    for chunk_tokens in (8192, 4 * block + 3, block):
        with Box(layout, EngineOptions(max_batched_tokens=chunk_tokens)) as box:
            engine = box.engine()
            engine.serve(shared + tokens(4 * block + 3), "A", **declare(6 * block))
            hit = box.engine().serve(shared + tokens(3 * block + 1), "B")
            assert hit.store_hit_tokens == expected
            # Where it was served, the local cache has it as well.
            local = engine.serve(shared + tokens(3 * block + 2), "C")
            assert local.local_hit_tokens == expected
            assert box.faults() == []


def test_an_instance_without_lookups_keeps_declared_positions_as_well() -> None:
    tokens = Tokens()
    shared = tokens(96)
    with Box(FULL_SWA) as box:
        saver = box.engine(
            role="kv_producer",
            extra_config={"enable_lookup": False, "junctions_predict": 4},
        )
        saver.serve(shared + tokens(67), "A", **declare(96))
        assert box.engine().serve(shared + tokens(40), "B").store_hit_tokens == 96


# What clients may send


@pytest.fixture
def box() -> Iterator[Box]:
    with Box(FULL_SWA) as box:
        yield box
        assert box.faults() == []


BAD = {
    "negative": ([-16], "out_of_range"),
    "zero": ([0], "out_of_range"),
    "beyond the prompt": ([161], "out_of_range"),
    "huge": ([10**40], "out_of_range"),
    "bool": ([True], "not_an_integer"),
    "string": (["96"], "not_an_integer"),
    "float": ([96.0], "not_an_integer"),
    "nested": ([[96]], "not_an_integer"),
    "none": ([None], "not_an_integer"),
    "not a number": ([float("nan")], "not_an_integer"),
    "a number": (96, "not_a_list"),
    "a word": ("96", "not_a_list"),
    "a dict": ({"96": 96}, "not_a_list"),
    "nothing": (None, "not_a_list"),
    "no whole block": ([15], "too_short"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_a_position_costs_nothing_but_itself(
    box: Box, case: str
) -> None:
    value, reason = BAD[case]
    prompt = Tokens()(160)
    engine = box.engine()
    noted = Counted(engine)
    served = engine.serve(prompt, "A", kv_transfer_params={"junctions": value})
    assert served.finish_reason == "length"
    assert shared_prefix_boundaries(engine.request("A")) == ()
    assert noted.by_label(DECLARED_IGNORED) == {reason: 1}


def test_good_entries_beside_bad_ones_count(box: Box) -> None:
    tokens = Tokens()
    prompt = tokens(160)
    engine = box.engine()
    noted = Counted(engine)
    engine.serve(prompt, "A", **declare(96, 64, "x", 128, 144))
    assert junctions_of(engine.request("A")).declared == (96, 128)
    assert noted.by_label(DECLARED_IGNORED) == {
        "not_ascending": 1,
        "not_an_integer": 1,
        "too_many": 1,
    }
    for shared in (96, 128):
        sibling = prompt[:shared] + tokens(40)
        assert box.engine().serve(sibling, "B").store_hit_tokens == shared


def test_the_first_of_a_kind_is_logged_and_names_nothing_of_the_clients(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    engine, tokens = box.engine(), Tokens()
    with caplog.at_level(logging.WARNING, counted.__name__):
        for number in range(3):
            engine.serve(tokens(160), str(number), **declare("secret"))
        engine.serve(tokens(160), "another kind", **declare(1 << 20))
    said = [one.message for one in caplog.records if "kv_transfer_" in one.message]
    assert len(said) == 2
    assert not any("secret" in message for message in said)


def test_params_of_other_connectors_are_left_alone(box: Box) -> None:
    params = {"do_remote_decode": False, "junctions": [96], "x": [1]}
    engine = box.engine()
    engine.serve(Tokens()(160), "A", kv_transfer_params=params)
    assert params == {"do_remote_decode": False, "junctions": [96], "x": [1]}
    assert engine.request("A").kv_transfer_params == params


@pytest.mark.parametrize("params", [{}, {"junctions": []}, {"x": 1}])
def test_declaring_nothing_is_no_fault(box: Box, params: dict) -> None:
    engine = box.engine()
    noted = Counted(engine)
    engine.serve(Tokens()(160), "A", kv_transfer_params=params)
    assert shared_prefix_boundaries(engine.request("A")) == ()
    assert not noted.by_label(DECLARED_IGNORED)


@pytest.mark.parametrize("side", ["off", "stock"])
def test_switched_off_the_key_changes_nothing(side: Any) -> None:
    prompt = Tokens()(160)
    puts = []
    for fields in ({}, declare(96), {"kv_transfer_params": {"junctions": "x"}}):
        with Box(FULL_SWA, EngineOptions(side=side)) as box:
            engine = box.engine()
            engine.serve(prompt, "A", **fields)
            puts.append([(key.rpartition("@")[2]) for _, key in box.store.puts])
    assert puts[0] == puts[1] == puts[2]


# What is counted


def test_who_was_served_and_what_it_cost_is_counted(box: Box) -> None:
    tokens = Tokens()
    shared = tokens(96)
    engine = box.engine()
    noted = Counted(engine)
    engine.serve(shared + tokens(67), "A", **declare(96))
    assert noted[FOUND.name, "declared"] == 1
    assert noted[EXTRA_BYTES.name, "declared"] == noted[TAIL_BYTES.name,] > 0
    engine.reset_local_cache()
    for name in "BC":
        engine.serve(shared + tokens(60), name)
        engine.reset_local_cache()
    # C would have hit what B found.
    assert noted.by_label(FIRST_SIBLINGS) == {"declared": 1}
    assert noted.by_label(FIRST_SIBLING_TOKENS) == {"declared": 96}


# Prediction


def ask_twice(
    engine: BoxEngine, tokens: Tokens, number: int, options: dict | None = None
) -> int:
    """Serve a new document with two questions; return what the second one hit."""
    block = engine.layout.scheduler_block_tokens
    document = tokens(20 * block + 8)
    engine.serve(document + tokens(3 * block), f"{number} first", **options or {})
    engine.reset_local_cache()
    served = engine.serve(document + tokens(3 * block + 5), f"{number} second")
    engine.reset_local_cache()
    return served.store_hit_tokens


@pytest.mark.parametrize(
    "layout", [FULL_SWA, FULL_SWA_EAGLE, FULL_MAMBA, DEEPSEEK_V4], ids=str
)
def test_after_a_few_documents_the_first_sibling_hits(layout: Layout) -> None:
    tokens = Tokens()
    block = layout.scheduler_block_tokens
    with Box(layout, EngineOptions(extra_config=PREDICT)) as box:
        engine = box.engine()
        noted = Counted(engine)
        hits = [ask_twice(engine, tokens, number) for number in range(8)]
        assert hits[0] == 0
        assert all(hit >= 16 * block for hit in hits[4:])
        predicted = [
            junctions_of(engine.request(f"{number} first")).predicted
            for number in range(8)
        ]
        assert [len(tails) for tails in predicted] == [bool(hit) for hit in hits]
        served = sum(hit > 0 for hit in hits)
        assert noted.by_label(FIRST_SIBLINGS) == {"predicted": served}
        assert noted.by_label(FIRST_SIBLING_TOKENS) == {"predicted": sum(hits)}
        assert noted[FOUND.name, "predicted"] >= served
        assert noted[EXTRA_BYTES.name, "predicted"] > 0
        assert box.faults() == []


def test_without_it_the_first_sibling_never_hits(box: Box) -> None:
    tokens, engine = Tokens(), box.engine()
    assert not any(ask_twice(engine, tokens, number) for number in range(8))


def test_it_stops_by_itself_when_nothing_is_served() -> None:
    tokens = Tokens()
    with Box(FULL_SWA, EngineOptions(extra_config=PREDICT)) as box:
        engine = box.engine()
        for number in range(6):
            ask_twice(engine, tokens, number)
        noted = Counted(engine)
        placed = []
        for number in range(120):
            engine.serve(tokens(23 * 16), f"alone {number}")
            placed.append(
                len(junctions_of(engine.request(f"alone {number}")).predicted)
            )
        assert sum(placed[:3]) == 3
        assert sum(placed[60:]) == 0
        assert not noted.by_label(FIRST_SIBLINGS)


def test_declared_positions_come_first_and_four_are_the_most() -> None:
    tokens = Tokens()
    options = EngineOptions(extra_config={"junctions_predict": 4})
    with Box(FULL_SWA, options) as box:
        engine = box.engine()
        for number in range(6):
            ask_twice(engine, tokens, number)
        for number, num_declared in enumerate((0, 3, 4)):
            positions = [16 * (1 + index) for index in range(num_declared)]
            engine.serve(tokens(23 * 16), f"D{number}", **declare(*positions))
            found = junctions_of(engine.request(f"D{number}"))
            assert found.declared == tuple(positions)
            assert len(found.predicted) == (1 if num_declared < 4 else 0)


def test_a_resumed_request_is_no_sibling_of_itself() -> None:
    tokens = Tokens()
    with Box(FULL_SWA, EngineOptions(extra_config=PREDICT)) as box:
        engine = box.engine(max_batched_tokens=64)
        noted = Counted(engine)
        for number in range(10):
            engine.add(tokens(23 * 16), f"{number}", max_tokens=20)
            for _ in range(4):
                engine.step()
            engine.preempt()
            engine.reset_local_cache()
            engine.run()
            engine.reset_local_cache()
            assert junctions_of(engine.request(f"{number}")).predicted == ()
        assert not noted.by_label(FIRST_SIBLINGS)


def test_prompts_under_another_salt_are_no_siblings() -> None:
    tokens = Tokens()
    with Box(FULL_SWA, EngineOptions(extra_config=PREDICT)) as box:
        engine = box.engine()
        for number in range(8):
            shared = tokens(20 * 16)
            for salt in "ab":
                name = f"{number}{salt}"
                engine.serve(shared + tokens(50), name, cache_salt=name)
                engine.reset_local_cache()
                assert junctions_of(engine.request(name)).predicted == ()


def test_a_consumer_learns_and_places_nothing() -> None:
    tokens = Tokens()
    with Box(FULL_SWA, EngineOptions(extra_config=PREDICT)) as box:
        consumer = box.engine(role="kv_consumer")
        for number in range(6):
            document = tokens(20 * 16)
            box.engines[-1].reset_local_cache()
            producer = box.engine(role="kv_producer", extra_config={})
            producer.serve(document + tokens(50), f"{number} first")
            consumer.serve(document + tokens(55), f"{number} second")
            request = consumer.request(f"{number} second")
            assert junctions_of(request).predicted == ()


# Mamba


def chunk_ends(engine: BoxEngine, request_id: str) -> list[int]:
    ends, total = [], 0
    for step in engine.steps:
        total += step.num_scheduled_tokens.get(request_id, 0)
        ends.append(total)
    return sorted(set(ends) - {0})


def test_mamba_stops_at_two_at_most_and_at_what_lookups_found_first() -> None:
    block = FULL_MAMBA.scheduler_block_tokens
    tokens = Tokens()
    prompt = tokens(12 * block + 3)
    with Box(FULL_MAMBA) as box:
        engine = box.engine()
        engine.serve(prompt, "A", **declare(2 * block, 4 * block, 6 * block))
        assert chunk_ends(engine, "A")[:3] == [4 * block, 6 * block, 12 * block]
        finder = box.engine()
        sibling = prompt[: 9 * block] + tokens(3 * block)
        finder.serve(sibling, "B", **declare(7 * block, 8 * block))
        ends = [6 * block + end for end in chunk_ends(finder, "B")]
        assert ends[:2] == [8 * block, 9 * block]
        assert box.faults() == []


def test_with_eagle_what_lookups_found_takes_both_stops() -> None:
    block = FULL_MAMBA_EAGLE.scheduler_block_tokens
    tokens = Tokens()
    prompt = tokens(12 * block + 3)
    with Box(FULL_MAMBA_EAGLE) as box:
        box.engine().serve(prompt, "A")
        finder = box.engine()
        sibling = prompt[: 9 * block] + tokens(3 * block)
        finder.serve(sibling, "B", **declare(4 * block))
        assert chunk_ends(finder, "B")[:2] == [7 * block, 8 * block]


def test_a_position_just_above_a_chunks_end_moves_there() -> None:
    """No step for a few tokens: the chunk that ends there anyway keeps the state."""
    block = FULL_MAMBA.scheduler_block_tokens
    tokens = Tokens()
    prompt = tokens(40 * block)
    steps = {}
    for position in (None, 17 * block):
        with Box(FULL_MAMBA, EngineOptions(max_batched_tokens=16 * block)) as box:
            engine = box.engine()
            fields = {} if position is None else declare(position)
            engine.serve(prompt, "A", **fields)
            steps[position] = chunk_ends(engine, "A")
            if position:
                sibling = prompt[:position] + tokens(40)
                hit = box.engine().serve(sibling, "B").store_hit_tokens
                assert hit == 16 * block
    assert steps[None] == steps[17 * block]

# SPDX-License-Identifier: Apache-2.0
"""What junctions do in each mode of the store connector.

Prompts A, B, C and D share a prefix. Unless a test says otherwise, A was served and
saved by an ordinary instance before an instance of the mode in question serves B.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.box import Box, BoxEngine, EngineOptions, Side
from tests.engine.layouts import FULL_SWA, Tokens, siblings

PROMPTS, SHARED_TOKENS = siblings(FULL_SWA)
A, B, C, D = PROMPTS


@pytest.mark.parametrize("lookup", ["two_phase", "at_once"])
def test_siblings_hit_however_lookups_ask(lookup: str) -> None:
    prompts, shared_tokens = siblings(FULL_SWA)
    options = EngineOptions(extra_config={"junctions_lookup": lookup})
    with Box(FULL_SWA, options) as box:
        hits = [
            box.engine().serve(prompt, str(index)).store_hit_tokens
            for index, prompt in enumerate(prompts)
        ]
        worker = box.engines[-1].worker.connector_worker
        assert (worker._lookup_plan is None) == (lookup == "at_once")
    assert hits == [0, 0, shared_tokens, shared_tokens]


@pytest.fixture
def box() -> Iterator[Box]:
    with Box(FULL_SWA) as box:
        box.engine().serve(A, "A")
        yield box
        assert box.faults() == []


def hits(engine: BoxEngine, prompt: list[int], name: str, **options) -> tuple[int, int]:
    """Return the tokens that a request hit locally and in the store."""
    served = engine.serve(prompt, name, **options)
    return served.local_hit_tokens, served.store_hit_tokens


def fresh_hit(box: Box, prompt: list[int], name: str = "fresh") -> int:
    """Return what a new, ordinary instance hits in the store."""
    return hits(box.engine(), prompt, name)[1]


def test_both_saves_what_it_finds(box: Box) -> None:
    assert hits(box.engine(), B, "B") == (0, 0)
    assert fresh_hit(box, C) == SHARED_TOKENS


def test_a_producer_saves_what_it_finds(box: Box) -> None:
    assert hits(box.engine(role="kv_producer"), B, "B") == (0, 0)
    assert fresh_hit(box, C) == SHARED_TOKENS


def test_a_consumer_keeps_junctions_locally_and_saves_nothing(box: Box) -> None:
    consumer = box.engine(role="kv_consumer")
    before = len(box.store.puts)
    assert hits(consumer, B, "B") == (0, 0)
    assert hits(consumer, C, "C") == (SHARED_TOKENS, 0)
    assert len(box.store.puts) == before
    assert fresh_hit(box, D) == 0


def test_a_consumer_loads_tails_that_a_producer_saved(box: Box) -> None:
    box.engine(role="kv_producer").serve(B, "B")
    assert hits(box.engine(role="kv_consumer"), C, "C") == (0, SHARED_TOKENS)


def test_a_consumer_that_saves_decoded_tokens_comes_too_late_for_tails(
    box: Box,
) -> None:
    """Its first save comes with decoding, when the window has left the junction."""
    consumer = box.engine(role="kv_consumer", extra_config={"save_decode_cache": True})
    before = len(box.store.puts)
    block = FULL_SWA.scheduler_block_tokens
    assert hits(consumer, B, "B", max_tokens=2 * block) == (0, 0)
    assert len(box.store.puts) > before
    assert hits(consumer, C, "C") == (SHARED_TOKENS, 0)
    assert fresh_hit(box, D) == 0


def test_without_lookups_only_local_junctions_are_found_and_saved(box: Box) -> None:
    engine = box.engine(extra_config={"enable_lookup": False})
    assert hits(engine, B, "B") == (0, 0)
    # Nothing is known locally yet, and the store, which knows A, was not asked.
    saved = {tokens for group, tokens, _ in box.stored() if group == 1}
    assert SHARED_TOKENS not in saved
    assert hits(engine, C, "C") == (0, 0)
    assert hits(engine, D, "D") == (SHARED_TOKENS, 0)
    another = D[:SHARED_TOKENS] + Tokens(seed=1)(64)
    assert fresh_hit(box, another) == SHARED_TOKENS


def test_lookups_in_the_background_find_the_same(box: Box) -> None:
    options = {"extra_config": {"lookup_async": True}}
    assert hits(box.engine(**options), B, "B") == (0, 0)
    assert hits(box.engine(**options), C, "C") == (0, SHARED_TOKENS)


def test_capacity_only_neither_looks_up_nor_saves(box: Box) -> None:
    """A consumer without lookups only lends its memory to the store."""
    engine = box.engine(role="kv_consumer", extra_config={"enable_lookup": False})
    before = len(box.store.puts)
    assert hits(engine, B, "B") == (0, 0)
    assert hits(engine, C, "C") == (0, 0)
    assert hits(engine, D, "D") == (SHARED_TOKENS, 0)
    assert len(box.store.puts) == before


def test_capacity_only_serves_with_recording_on(box: Box, tmp_path: Path) -> None:
    """vLLM 0.33 has no store coordinator then, and so no layout to record."""
    path = str(tmp_path / "traffic.jsonl")
    engine = box.engine(
        role="kv_consumer",
        extra_config={"enable_lookup": False, "junctions_record": path},
    )
    assert hits(engine, B, "B") == (0, 0)


@pytest.mark.parametrize("side", ["stock", "on"])
def test_synchronous_loads_are_refused_by_vllm_itself(box: Box, side: Side) -> None:
    """Both supported versions assert ``load_async``, so junctions change nothing."""
    engine = box.engine(side=side, extra_config={"load_async": False})
    engine.add(B, "B")
    with pytest.raises(AssertionError, match="load_async"):
        engine.run()

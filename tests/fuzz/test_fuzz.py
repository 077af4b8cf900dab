# SPDX-License-Identifier: Apache-2.0
"""Nonsense from the wire and in the settings: refused, never fatal.

The number of examples is that of the laws; ``make fuzz`` runs the same targets under
a coverage-guided fuzzer.
"""

import itertools
import struct

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from testbed.box import Box, BoxEngine, EngineOptions, Layout
from tests.engine.layouts import SPARSE_LAYOUTS, Tokens
from tests.engine.wire import AnsweringWire
from tests.fuzz.targets import LookupClient, check_config
from vllm.junctions.lookup.wire import JUNCTION_GROUP_ID, HitUnits

_MAX = 2**32 - 1
_U32 = st.integers(0, _MAX)


@pytest.fixture(scope="module")
def client() -> LookupClient:
    return LookupClient()


@st.composite
def units(draw) -> HitUnits:
    hash_tokens = draw(st.sampled_from([1, 4, 16]))
    block_tokens = hash_tokens * draw(st.sampled_from([1, 2, 64]))
    hit = draw(st.sampled_from([hash_tokens, block_tokens]))
    return HitUnits(hash_tokens, hit, block_tokens)


def answers(num_tokens: int, unit: int) -> st.SearchStrategy[bytes]:
    """Answers of which many are nearly right."""
    lengths = st.integers(0, num_tokens // unit + 2).map(lambda count: count * unit)
    near = st.one_of(lengths, st.integers(0, num_tokens + 2), st.just(num_tokens), _U32)
    groups = st.one_of(st.integers(0, 3), st.just(JUNCTION_GROUP_ID), _U32)

    def with_entries(hit: int) -> st.SearchStrategy[bytes]:
        above = st.integers(-1, 20).map(lambda tokens: min(max(hit + tokens, 0), _MAX))
        entry = st.tuples(groups, st.one_of(above, st.just(hit), near))
        return st.lists(entry, max_size=3).map(
            lambda entries: struct.pack(
                f">{1 + 2 * len(entries)}I", hit, *itertools.chain(*entries)
            )
        )

    hits = st.one_of(lengths, lengths, near)
    return st.one_of(hits.flatmap(with_entries), st.binary(max_size=40))


@given(st.data(), st.integers(0, 5000), units())
def test_an_answer_is_taken_exactly_if_it_can_be_the_requests(
    client: LookupClient, data, num_tokens: int, units: HitUnits
) -> None:
    payload = data.draw(answers(num_tokens, units.hit))
    taken = client.check(payload, num_tokens, units)
    event(f"taken: {taken}, hit: {taken and any(payload[:4])}")


_VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        st.integers(-1, 3_600_001),
    ),
    lambda values: st.one_of(
        st.lists(values, max_size=3), st.dictionaries(st.text(), values, max_size=3)
    ),
    max_leaves=6,
)
_KEYS = st.one_of(
    st.sampled_from(["junctions", "junctions_lookup_timeout_ms", "junction", "x"]),
    st.text(max_size=4).map("junction".__add__),
    st.text(max_size=8),
    st.integers(),
)


@given(st.dictionaries(_KEYS, _VALUES, max_size=4))
@example({"junctions": True, "junctions_lookup_timeout_ms": 3_600_000})
def test_settings_are_read_as_given_or_refused_by_name(extra_config: dict) -> None:
    event(f"accepted: {check_config(extra_config)}")


@pytest.fixture(scope="module", params=SPARSE_LAYOUTS.values(), ids=SPARSE_LAYOUTS)
def stored(request) -> tuple[Box, BoxEngine, list[int]]:
    """An engine, and a prompt that another one has stored.

    Where hits can end within a block, a wrong answer can name the key of another
    prefix that is there, so nothing is: whatever is promised cannot be loaded.
    """
    layout: Layout = request.param
    prompt = Tokens()(8 * layout.scheduler_block_tokens + 1)
    with Box(layout, EngineOptions(load_failure_policy="recompute")) as box:
        if not layout.mamba_junction_checkpoints:
            box.engine().serve(prompt, "A")
        yield box, box.engine(role="kv_consumer"), prompt


@given(st.data())
def test_no_answer_stops_an_engine(stored, data) -> None:
    """A request whose lookup is answered with nonsense ends, on its own KV."""
    box, engine, prompt = stored
    payload = data.draw(answers(len(prompt), box.layout.hash_tokens))
    name = f"{len(engine.served)}"
    engine.reset_local_cache()
    with AnsweringWire(engine) as wire:
        wire.payload = payload
        served = engine.serve(prompt, name)
    assert served.finish_reason == "length"
    assert served.store_hit_tokens < len(prompt)
    event(f"hit: {served.store_hit_tokens > 0}")

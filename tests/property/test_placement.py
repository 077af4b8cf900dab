# SPDX-License-Identifier: Apache-2.0
"""What holds of predicted tails whatever lookups say."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm.junctions.rules.best_tails import best_tails
from vllm.junctions.rules.boundaries import junction_boundaries
from vllm.junctions.rules.placement import FinishedLookup, TailPlacement
from vllm.junctions.rules.siblings import Owner, PrefixOwners


@st.composite
def requests(draw, block: int, use_eagle: bool) -> tuple[int, int, int, int]:
    """Length, hit, longest hit and family of a request."""
    num_tokens = draw(st.integers(1, 300 * block))
    longest = draw(st.integers(0, (num_tokens - 1) // block)) * block
    hit = draw(st.integers(0, longest // block)) * block
    return num_tokens, hit, longest, draw(st.integers(0, 5))


@st.composite
def runs(draw):
    block = draw(st.sampled_from([16, 256]))
    use_eagle = draw(st.booleans())
    max_tails = draw(st.integers(0, 4))
    seen = draw(st.lists(requests(block, use_eagle), min_size=1, max_size=40))
    return block, use_eagle, max_tails, seen


def replay(block, use_eagle, max_tails, seen):
    placement = TailPlacement(max_tails, block, use_eagle)
    for index, (num_tokens, hit, longest, family) in enumerate(seen):
        lookup = FinishedLookup(
            num_tokens,
            hit,
            junction_boundaries(hit, longest, block, use_eagle),
            lambda end, longest=longest, family=family, index=index: (
                (family, end) if end <= longest else (index + 10, end)
            ),
        )
        saved = placement.observe(lookup)
        yield lookup, saved, placement.place(lookup)


@given(runs())
def test_tails_are_few_ascending_aligned_and_within_the_prompt(run):
    block, _, max_tails, _ = run
    for lookup, saved, tails in replay(*run):
        assert len(tails) <= max_tails
        assert list(tails) == sorted(set(tails))
        assert all(
            lookup.hit_tokens < tail < lookup.num_tokens and not tail % block
            for tail in tails
        )
        assert not set(tails) & set(lookup.junctions)
        assert 0 <= saved <= lookup.hit_tokens


@given(runs())
def test_the_same_lookups_give_the_same_tails(run):
    first = [(saved, tails) for _, saved, tails in replay(*run)]
    assert first == [(saved, tails) for _, saved, tails in replay(*run)]


@given(runs())
def test_nothing_is_placed_before_a_sibling_was_lost(run):
    has_lost = False
    for lookup, _, tails in replay(*run):
        has_lost |= bool(lookup.junctions)
        assert has_lost or not tails


@given(st.lists(st.integers(0, 2000), max_size=60), st.integers(1, 50))
def test_owners_are_bounded(lengths, max_prefixes):
    owners = PrefixOwners(16, max_prefixes)
    for index, num_tokens in enumerate(lengths):
        owners.add(
            Owner(num_tokens, num_tokens, ()),
            0,
            lambda end, index=index: (index, end),
        )
        assert len(owners) <= max_prefixes


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.integers(0, 20)), min_size=1, max_size=7
    ),
    st.sets(st.integers(1, 1000), max_size=4),
    st.integers(1, 4),
    st.integers(0, 3000),
)
def test_best_tails_are_what_brute_force_finds(siblings, known, max_tails, price):
    positions = np.array(sorted((p for p, _ in siblings), reverse=True))
    rates = np.array([float(rate) for _, rate in siblings])
    other = [max(k for k in {0, *known} if k <= p) for p in positions]

    def worth(chosen) -> float:
        total = -price * len(chosen)
        for index, position in enumerate(positions):
            usable = [positions[tail] for tail in chosen if tail <= index]
            assert all(tail >= position for tail in usable) or not usable
            best = max((p for p in positions[list(chosen)] if p <= position), default=0)
            total += rates[index] * max(best - other[index], 0)
        return total

    best = max(
        worth(chosen)
        for size in range(max_tails + 1)
        for chosen in combinations(range(len(positions)), size)
    )
    num_siblings = np.concatenate([[0], rates.cumsum()])
    found = best_tails(
        positions, num_siblings, np.array(other, dtype=float), max_tails, price
    )
    assert len(found) <= max_tails
    assert worth(found) == max(best, 0)

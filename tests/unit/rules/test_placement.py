# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from vllm.junctions.rules.best_tails import best_tails, dense_span_tokens
from vllm.junctions.rules.placement import FinishedLookup, TailPlacement
from vllm.junctions.rules.tails import TailShape

BLOCK = 256


def lookup(family: object, num_tokens: int, hit: int = 0, longest: int = 0, own=None):
    """A prompt that shares ``longest`` tokens with its family, and then parts."""
    own = object() if own is None else own
    junctions = (longest,) if longest > hit else ()
    return FinishedLookup(
        num_tokens,
        hit,
        junctions,
        lambda end: (family, end) if end <= max(longest, hit) else (own, end),
    )


def serve(placement: TailPlacement, request: FinishedLookup) -> tuple[int, ...]:
    placement.observe(request)
    return placement.place(request)


def ask_twice(
    placement: TailPlacement,
    document: object,
    num_tokens: int = 20_480,
    is_stored: bool = True,
) -> tuple[int, ...]:
    """A new document with one question, and another; return the first one's tails."""
    shared = num_tokens - 1024
    tails = serve(placement, lookup(document, num_tokens, own=document))
    found = [tail for tail in tails if is_stored and tail <= shared]
    serve(placement, lookup(document, num_tokens, max(found, default=0), shared))
    return tails


def taught(max_tails: int = 1, num_documents: int = 40) -> TailPlacement:
    placement = TailPlacement(max_tails, BLOCK, use_eagle=False)
    for _ in range(num_documents):
        ask_twice(placement, object())
    return placement


def test_with_eagle_the_one_position_leaves_room_for_the_proof_block():
    placement = TailPlacement(1, BLOCK, use_eagle=True)
    for _ in range(40):
        document = object()
        serve(placement, lookup(document, 20_480, own=document))
        longest = 20_480 - 1024
        sibling = lookup(document, 20_480, 0, longest)
        sibling = FinishedLookup(
            20_480, 0, (longest - BLOCK, longest), sibling.prefix_key
        )
        serve(placement, sibling)
    (tail,) = serve(placement, lookup(object(), 20_480))
    assert tail <= 20_480 - 1024 - BLOCK


def test_one_sibling_in_a_thousand_prompts_is_no_reason():
    placement = TailPlacement(1, BLOCK, use_eagle=False)
    placed = 0
    for index in range(4000):
        placed += len(serve(placement, lookup(object(), 8192)))
        if index % 1000 == 999:
            placed += len(ask_twice(placement, object(), 8192))
    assert placed < 200


def test_a_prompt_whose_prefix_is_known_gets_none():
    """A sibling would hit where this one did; there is little to gain above."""
    placement = taught()
    longest = 20_480 - 1280
    assert serve(placement, lookup(object(), 20_480, longest, longest)) == ()


def test_a_prompt_too_short_for_any_known_distance_gets_none():
    assert serve(taught(4), lookup(object(), 1024)) == ()
    assert serve(taught(4), lookup(object(), 100)) == ()


def test_it_stops_when_siblings_stop_coming_and_starts_again():
    placement = taught()
    tails = [serve(placement, lookup(object(), 20_480)) for _ in range(400)]
    assert tails[0]
    assert not any(tails[200:])
    for _ in range(3):
        ask_twice(placement, object())
    assert serve(placement, lookup(object(), 20_480))


def test_it_places_less_while_its_tails_are_never_found():
    """Evicted, or not saved in time: siblings come, and hit nothing all the same."""
    placed = {}
    for is_stored in (True, False):
        placement = taught()
        placed[is_stored] = sum(
            len(ask_twice(placement, object(), 4096, is_stored)) for _ in range(400)
        )
    assert placed[True] > 300
    assert placed[False] < placed[True] / 2


def test_a_tail_counts_as_used_once():
    placement = taught()
    document = object()
    (tail,) = serve(placement, lookup(document, 20_480, own=document))
    assert placement.observe(lookup(document, 20_480, tail, tail)) == tail
    assert placement.observe(lookup(document, 20_480, tail, tail)) == 0


def test_siblings_of_another_instances_prompts_teach_as_well():
    placement = TailPlacement(1, BLOCK, use_eagle=False)
    for _ in range(40):
        serve(placement, lookup(object(), 20_480))
        serve(placement, lookup(object(), 20_480, 0, 20_480 - 1024))
    assert serve(placement, lookup(object(), 20_480))


@pytest.mark.parametrize(
    "arguments",
    [(-1, BLOCK, False), (5, BLOCK, False), (1, 0, False), (1, 16, True, 0)],
)
def test_numbers_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="must be"):
        TailPlacement(*arguments)


def test_best_tails_of_the_docstring():
    positions, num_siblings = np.array([4096, 1024]), np.array([0.0, 2.0, 3.0])
    other = np.zeros(2)
    assert best_tails(positions, num_siblings, other, 1, 100) == [0]
    assert best_tails(positions, num_siblings, other, 2, 100) == [0, 1]
    assert best_tails(positions, num_siblings, other, 2, 2000) == [0]
    assert best_tails(positions, num_siblings, other, 2, 9000) == []


def test_what_dense_retention_spends_a_tail_on():
    window = TailShape(64, 256, (2, 3), drops=True)
    carry = TailShape(4, 256, (2, 2))
    assert dense_span_tokens([window, carry], 256) == 256
    assert dense_span_tokens([TailShape(16, 16, (64, 65))], 16) == 1024
    assert dense_span_tokens([], 256) == 256

# SPDX-License-Identifier: Apache-2.0
import itertools
import random

import pytest

from vllm.junctions.declared.positions import (
    KnownPositions,
    num_common_tokens,
    with_marks,
)


def test_common_tokens_are_counted_from_the_start():
    rng = random.Random(0)
    for _ in range(500):
        one = rng.choices(range(3), k=rng.randrange(40))
        other = [*one[: rng.randrange(40)], *rng.choices(range(3), k=rng.randrange(9))]
        pairs = zip(one, other, strict=False)
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        assert num_common_tokens(one, other) == len(list(alike))


@pytest.mark.parametrize(
    ("explicit", "marks", "expected"),
    [
        (None, (70, 40), [40, 70]),
        ([], (40, 40), [40]),
        ([100], (40, 50, 60, 70), [50, 60, 70, 100]),
        ([40], (40, 50), [40, 50]),
        ([1, 2, 3, 4], (50,), [1, 2, 3, 4]),
        ([1, 2, 3, 4, 5], (50,), [1, 2, 3, 4, 5]),
        # Whoever reads positions says what is wrong with these.
        ([5, 5], (50,), None),
        (["5"], (50,), None),
        ([True], (50,), None),
        ({"a": 1}, (50,), None),
    ],
)
def test_explicit_positions_come_first_and_the_last_marks_after(
    explicit, marks, expected
):
    assert with_marks(explicit, marks) == expected


def test_a_known_text_is_known_in_prompts_that_begin_with_its_tokens():
    known = KnownPositions(max_entries=2)
    known.add("abc", [1, 2, 3, 9], 3)
    assert known.get("abc", [1, 2, 3, 4, 5]) == 3
    # The same text in other tokens: a merge across the mark.
    assert known.get("abc", [1, 2, 7, 4, 5]) is None
    assert known.get("abcd", [1, 2, 3, 4, 5]) is None
    known.add("b", [1], 1)
    known.get("abc", [1, 2, 3])
    known.add("c", [1], 1)
    assert known.get("b", [1]) is None
    assert known.get("abc", [1, 2, 3]) == 3

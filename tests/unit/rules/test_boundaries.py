# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.junctions.rules.boundaries import (
    at_chunk_end,
    chunk_stops,
    junction_boundaries,
    merge_boundaries,
    split_valid_boundaries,
)


@pytest.mark.parametrize(
    ("hit", "longest", "eagle", "expected"),
    [
        (0, 0, False, ()),
        (512, 512, False, ()),
        (512, 256, True, ()),
        (0, 3840, False, (3840,)),
        (3584, 3840, False, (3840,)),
        (0, 3840, True, (3584, 3840)),
        (0, 256, True, (256,)),
        (3584, 3840, True, (3840,)),
        (3328, 3840, True, (3584, 3840)),
    ],
)
def test_positions_above_the_joint_hit(hit, longest, eagle, expected):
    assert junction_boundaries(hit, longest, 256, eagle) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((-1, 0, 256, False), "hit_length=-1"),
        ((0, -8, 256, False), "longest_hit_length=-8"),
        ((0, 8, 0, False), "scheduler_block_size must be positive, got 0"),
    ],
)
def test_impossible_numbers_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        junction_boundaries(*args)


def test_merge_is_ascending_and_distinct():
    assert merge_boundaries((3840,), (3584, 3840), ()) == (3584, 3840)


def test_positions_outside_the_request_are_counted_and_dropped():
    assert split_valid_boundaries((0, 9000, 3840, 3840, 4000), 4000) == (
        (3840, 4000),
        2,
    )


@pytest.mark.parametrize(
    ("local", "found", "declared", "predicted", "stops"),
    [
        (0, (), (), (), ()),
        (304, (), (), (), (304,)),
        (304, (256, 272), (), (), (304,)),
        (0, (288, 304), (64,), (128,), (288, 304)),
        (304, (320, 336), (64,), (128,), (304, 336)),
        (0, (304,), (64, 128), (192,), (128, 304)),
        (304, (), (), (64, 128), (128, 304)),
        (0, (), (64,), (128, 192), (64, 192)),
        (0, (), (64, 128, 192), (256,), (128, 192)),
        (0, (304,), (304,), (128,), (128, 304)),
    ],
)
def test_two_stops_and_what_was_found_first(local, found, declared, predicted, stops):
    assert chunk_stops(local, found, declared, predicted) == stops


@pytest.mark.parametrize(
    ("position", "start", "chunk", "end"),
    [
        (8704, 0, 8192, 8192),
        (12_288, 0, 8192, 12_288),
        (8192, 0, 8192, 8192),
        (512, 0, 8192, 512),
        (8704, 512, 8192, 8704),
        (9216, 512, 8192, 8704),
        (8704, 0, 0, 8704),
    ],
)
def test_a_chunk_that_ends_just_below_is_as_good(position, start, chunk, end):
    assert at_chunk_end(position, start, chunk) == end

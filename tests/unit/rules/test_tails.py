# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.junctions.rules.tails import TailShape

# DeepSeek-V4's sliding window with MTP: window 128 in blocks of 64, hits of 256.
EAGLE = TailShape(64, 256, (2, 3), drops=True)
PLAIN = TailShape(64, 256, (2, 3))


def test_a_tail_is_the_window_below_a_position():
    assert PLAIN.blocks_at(512) == (6, 8)
    assert PLAIN.window(7, False) == (6, 8)
    assert PLAIN.position(7, False) == PLAIN.hit_tokens(7, False) == 512


def test_an_eagle_tail_has_the_proof_block_above():
    assert EAGLE.blocks_at(512) == (6, 9)
    assert EAGLE.window(8, True) == (6, 9)
    assert EAGLE.position(8, True) == EAGLE.hit_tokens(8, True) == 512


@pytest.mark.parametrize(
    ("num_blocks", "plain", "eagle"),
    [(8, 7, 4), (9, 7, 8), (7, 3, 4), (4, 3, 0), (1, -1, 0), (0, -1, -4)],
)
def test_candidates_lie_on_aligned_positions(num_blocks, plain, eagle):
    assert PLAIN.highest(num_blocks, False) == plain
    assert EAGLE.highest(num_blocks, True) == eagle


def test_no_candidate_is_no_hit():
    assert PLAIN.hit_tokens(-1, False) == EAGLE.hit_tokens(-4, True) == 0
    assert EAGLE.hit_tokens(0, True) == 0


def test_a_window_cut_off_at_the_start_loses_an_alignment_more_under_eagle():
    wide = TailShape(64, 256, (16, 17), drops=True)
    assert wide.window(8, True) == (0, 9)
    assert wide.hit_tokens(8, True) == 256
    assert wide.hit_tokens(16, True) == 1024


def test_every_block_can_be_a_candidate_where_hits_are_that_fine():
    state = TailShape(16, 16, (1, 1))
    assert state.step == 1
    assert [state.highest(count, False) for count in (3, 2, 1)] == [2, 1, 0]
    assert state.hit_tokens(2, False) == 48

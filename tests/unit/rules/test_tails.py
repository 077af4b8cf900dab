# SPDX-License-Identifier: Apache-2.0
from vllm.junctions.rules.tails import TailShape

# DeepSeek-V4's sliding window with MTP: window 128 in blocks of 64, hits of 256.
EAGLE = TailShape(64, 256, (2, 3), drops=True)
PLAIN = TailShape(64, 256, (2, 3))


def test_an_eagle_tail_has_the_proof_block_above():
    assert EAGLE.blocks_at(512) == (6, 9)
    assert EAGLE.window(8, True) == (6, 9)
    assert EAGLE.position(8, True) == EAGLE.hit_tokens(8, True) == 512


def test_no_candidate_is_no_hit():
    assert PLAIN.hit_tokens(-1, False) == EAGLE.hit_tokens(-4, True) == 0
    assert EAGLE.hit_tokens(0, True) == 0


def test_a_window_cut_off_at_the_start_loses_an_alignment_more_under_eagle():
    wide = TailShape(64, 256, (16, 17), drops=True)
    assert wide.window(8, True) == (0, 9)
    assert wide.hit_tokens(8, True) == 256
    assert wide.hit_tokens(16, True) == 1024

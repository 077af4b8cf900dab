# SPDX-License-Identifier: Apache-2.0
"""What the model of the laws and the box's clients do not meet."""

from vllm.junctions.rules.declared import declared_boundaries


def test_what_proves_a_hit_is_stored_with_the_whole_scheduler_block_above_it():
    assert declared_boundaries([5000], 5000, 256, 64).positions == (4608,)


def test_two_that_land_on_one_block_are_one_tail():
    assert declared_boundaries([3841, 3850], 5000, 256, 0).positions == (3840,)

# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.junctions.rules.declared import Flaw, declared_boundaries


@pytest.mark.parametrize(
    ("asked", "proof", "positions"),
    [
        ([3848], 0, (3840,)),
        ([3840], 0, (3840,)),
        ([3848], 64, (3584,)),
        ([3903], 64, (3584,)),
        ([3904], 64, (3840,)),
        ([4000], 64, (3840,)),
        ([512, 3848], 0, (512, 3840)),
        # Two that land on one block are one tail.
        ([3841, 3850], 0, (3840,)),
        # What proves a hit is stored with the whole scheduler block above it.
        ([5000], 0, (4864,)),
        ([5000], 64, (4608,)),
        ([], 0, ()),
    ],
)
def test_positions_are_floored_to_what_can_be_hit(asked, proof, positions):
    found = declared_boundaries(asked, 5000, 256, proof)
    assert (found.positions, found.flaws) == (positions, ())


def test_an_entry_is_compared_with_the_last_good_one():
    found = declared_boundaries([1024, 512, 9000, 2048], 5000, 256, 0)
    assert found.positions == (1024, 2048)
    assert found.flaws == (Flaw.NOT_ASCENDING, Flaw.OUT_OF_RANGE)


def test_a_long_list_costs_no_more_than_a_short_one():
    found = declared_boundaries(list(range(256, 10**6)), 10**6, 256, 0)
    assert found.flaws == (Flaw.TOO_MANY,)
    assert found.positions == (256,)

# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.junctions.repairs.batches import batches


@pytest.mark.parametrize(
    ("weights", "max_count", "lengths"),
    [
        ([1, 1, 1, 1], None, [4]),
        ([1, 1, 1, 1, 1], None, [4, 1]),
        ([3, 3, 1], None, [1, 2]),
        ([9, 1, 2], None, [1, 2]),
        ([2, 9], None, [1, 1]),
        ([0, 0, 0], 2, [2, 1]),
        ([], None, []),
    ],
)
def test_batches_are_light_and_lose_nothing(weights, max_count, lengths):
    runs = list(batches(weights, 4, max_count))
    assert [run.stop - run.start for run in runs] == lengths
    assert [one for run in runs for one in weights[run]] == weights

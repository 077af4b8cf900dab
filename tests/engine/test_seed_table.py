# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmarks import seed_table


@pytest.mark.parametrize("diverge_tokens", [row[0] for row in seed_table.EXPECTED])
@pytest.mark.parametrize(
    "tail_tokens", [seed_table.TAIL_TOKENS, seed_table.LUCKY_TAIL_TOKENS]
)
def test_siblings_hit_where_they_part(diverge_tokens: int, tail_tokens: int) -> None:
    series = seed_table.run_series(diverge_tokens, tail_tokens)

    assert seed_table.failures([series]) == []


def test_a_number_that_differs_is_reported() -> None:
    series = seed_table.run_series(8, seed_table.TAIL_TOKENS)
    swapped = seed_table.Series(
        series.tail_tokens,
        series.diverge_tokens,
        {"stock": series.rows["junctions"], "junctions": series.rows["stock"]},
    )

    assert len(seed_table.failures([swapped])) == 4

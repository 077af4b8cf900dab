# SPDX-License-Identifier: Apache-2.0
import numpy as np

from vllm.junctions.rules.siblings import Owner, PartingRates, PrefixOwners, ladder


def test_the_ladder_of_the_docstring():
    assert ladder(2)[:9].tolist() == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert ladder(2)[-1] == 65536


def test_what_a_hit_covers_stays_with_those_who_computed_it():
    owners = PrefixOwners(256)
    first, later = Owner(4096, 4096, ()), Owner(4096, 1024, ())
    owners.add(first, 0, lambda end: end)
    owners.add(later, 3072, lambda end: end)
    assert owners.find(3072, lambda end: end) is first
    assert owners.find(4000, lambda end: end) is later
    assert owners.find(255, lambda end: end) is None


def test_a_long_prompt_takes_few_places():
    owners = PrefixOwners(256)
    owners.add(Owner(131_072, 131_072, ()), 0, lambda end: end)
    assert len(owners) == 32


def test_more_siblings_narrow_what_is_expected_further_off():
    shares = []
    for num_siblings in (1, 40):
        rates = PartingRates(256)
        for _ in range(num_siblings):
            rates.add_prompt(8192)
            rates.add_sibling(1024, 8192)
        expected = rates.siblings_within(8192)
        assert expected[3] == 0
        shares.append(1 - expected[4] / expected[-1])
    assert np.allclose(shares, [1 / 2, 1 / 41])


def test_what_no_longer_happens_is_forgotten():
    rates = PartingRates(256)
    for _ in range(100):
        rates.add_prompt(8192)
        rates.add_sibling(1024, 8192)
    before = rates.siblings_within(8192)[-1]
    for _ in range(5000):
        rates.add_prompt(8192)
    assert rates.siblings_within(8192)[-1] < before / 1000


def test_kinds_of_prompts_are_told_apart_once_they_were_seen():
    rates = PartingRates(256)
    for _ in range(200):
        rates.add_prompt(16_384)
        rates.add_sibling(1024, 16_384)
        rates.add_prompt(512)
    assert rates.siblings_within(16_384)[-1] > 0.9
    assert rates.siblings_within(512)[-1] < 0.1

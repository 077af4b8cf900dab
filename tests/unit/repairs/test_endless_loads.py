# SPDX-License-Identifier: Apache-2.0
from vllm.junctions.store.load_failures import LoadFailures


def test_a_request_has_two_attempts():
    failures = LoadFailures()
    assert not failures.are_too_many("r")
    failures.add("r")
    assert not failures.are_too_many("r")
    failures.add("r")
    assert failures.are_too_many("r")
    assert not failures.are_too_many("other")


def test_a_request_that_ended_is_forgotten():
    failures = LoadFailures()
    for _ in range(2):
        failures.add("r")
    failures.discard(["r", "never seen"])
    assert not failures.are_too_many("r")
    assert len(failures) == 0

# SPDX-License-Identifier: Apache-2.0
"""Transfers with a peer that stands still for longer than Mooncake waits for them.

Found by ``make soak``: a read that had been given up was served late, into KV blocks of
another request, which then saved them.
"""

import pytest

from testbed.store import MooncakeMaster
from tests.e2e.frozen_peer import (
    DEFAULTS,
    Outcome,
    Reader,
    ending,
    outcome_of,
    read_from_a_frozen_peer,
    start,
    wait_for,
)

pytestmark = pytest.mark.slow

TRANSFER_FAIL = -800
# What a load of a few blocks has, and several threads that read at once.
_READERS: list[Reader] = [("stock", 122, 1), ("ours", 122, 1), ("ours", 40, 4)]


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    """A store as Mooncake's defaults have it."""
    folder = tmp_path_factory.mktemp("master")
    with MooncakeMaster(folder, extra_args=DEFAULTS) as master:
        yield master


@pytest.fixture(scope="module")
def outcomes(master: MooncakeMaster) -> dict[Reader, Outcome]:
    """What each reader says of a peer that stood still."""
    found = read_from_a_frozen_peer(master, _READERS)
    print(found)
    return found


def test_mooncake_writes_into_the_memory_of_reads_that_it_gave_up(outcomes) -> None:
    """Why loads land elsewhere; when this fails, ``repairs/late_loads`` may go."""
    assert outcomes["stock", 122, 1]["worst"] == TRANSFER_FAIL
    assert outcomes["stock", 122, 1]["late"] > 0


def test_nothing_comes_after_a_load_that_was_given_up(outcomes) -> None:
    for reader in _READERS[1:]:
        assert outcomes[reader]["worst"] == TRANSFER_FAIL
        # It was given up, not dropped in time.
        assert outcomes[reader]["seconds"] > 55
        assert outcomes[reader]["late"] == 0


def put(master: MooncakeMaster, how: str, num_keys: int) -> Outcome:
    address = f"127.0.0.1:{master.rpc_port}"
    owner = start("own", address, "other")
    with ending(owner):
        wait_for(owner, "ready")
        writer = start("write", address, how, num_keys)
        with ending(writer):
            return outcome_of(writer)


def test_mooncake_fails_puts_that_do_not_fit_its_queue(fresh_master) -> None:
    """Why puts are split; when this fails, ``repairs/short_puts.py`` may go."""
    assert put(fresh_master, "stock", 60)["failed"] > 0


def test_a_long_save_does_not_overflow_mooncakes_queue(fresh_master) -> None:
    assert put(fresh_master, "ours", 256)["failed"] == 0

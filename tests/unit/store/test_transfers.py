# SPDX-License-Identifier: Apache-2.0
"""Store calls are small, and one that was given up is over when it returns."""

from types import SimpleNamespace

import pytest

from vllm.junctions.store.transfers import TRANSFER_FAIL, BoundedStore, TransferLimits

GONE = -704


class Store:
    """Answers calls from a script of ``(seconds, results)``; else all goes well."""

    def __init__(self, *script: tuple[float, list[int]]) -> None:
        self.now = 0.0
        self.calls: list[list[str]] = []
        self._script = list(script)

    def batch_get_into_multi_buffers(self, keys, addrs, sizes):
        self.calls.append(list(keys))
        if not self._script:
            return [sum(one) for one in sizes]
        seconds, results = self._script.pop(0)
        self.now += seconds
        return results

    def batch_put_from_multi_buffers(self, keys, addrs, sizes, config):
        return self.batch_get_into_multi_buffers(keys, addrs, [[0] for _ in sizes])

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def bounded(self, max_transfers: int = 4) -> BoundedStore:
        return BoundedStore(
            self, max_transfers, 10, clock=lambda: self.now, sleep=self.sleep
        )


def values(*num_buffers: int):
    """Return keys, addresses and sizes of values with so many buffers each."""
    keys = [f"k{index}" for index in range(len(num_buffers))]
    return keys, [[0] * n for n in num_buffers], [[8] * n for n in num_buffers]


def put(bounded: BoundedStore, *args):
    return bounded.batch_put_from_multi_buffers(*args, SimpleNamespace())


# Sizes of calls


@pytest.mark.parametrize(
    ("num_buffers", "calls"),
    [
        ((1, 1, 1, 1), [4]),
        ((1, 1, 1, 1, 1), [4, 1]),
        ((3, 3, 1), [1, 2]),
        ((9, 1, 2), [1, 2]),
        ((2, 9), [1, 1]),
        ((), []),
    ],
)
def test_calls_have_few_buffers_and_lose_no_value(num_buffers, calls):
    store = Store()
    keys, addrs, sizes = values(*num_buffers)
    got = store.bounded().batch_get_into_multi_buffers(keys, addrs, sizes)
    assert got == [8 * n for n in num_buffers]
    assert [len(call) for call in store.calls] == calls
    assert [key for call in store.calls for key in call] == keys
    store.calls.clear()
    assert put(store.bounded(), keys, addrs, sizes) == [0] * len(keys)
    assert [len(call) for call in store.calls] == calls


def test_puts_with_a_group_for_each_key_stay_whole():
    store = Store()
    config = SimpleNamespace(group_ids=["a"] * 6)
    args = values(*[1] * 6)
    assert store.bounded().batch_put_from_multi_buffers(*args, config) == [0] * 6
    assert len(store.calls) == 1


def transfer(bounded: BoundedStore, is_put: bool, *args) -> list[int]:
    if is_put:
        return put(bounded, *args)
    return bounded.batch_get_into_multi_buffers(*args)


@pytest.mark.parametrize("is_put", [False, True])
def test_after_a_transfer_that_failed_twice_the_rest_is_not_tried(is_put: bool):
    store = Store((1, [8, 8, TRANSFER_FAIL, 8]), (1, [TRANSFER_FAIL]))
    done = transfer(store.bounded(), is_put, *values(*[1] * 6))
    assert done == [8, 8, TRANSFER_FAIL, 8, TRANSFER_FAIL, TRANSFER_FAIL]
    assert store.calls == [["k0", "k1", "k2", "k3"], ["k2"]]


@pytest.mark.parametrize("is_put", [False, True])
def test_what_was_dropped_is_tried_once_more_and_nothing_else(is_put: bool):
    store = Store(
        (10, [TRANSFER_FAIL, 8, TRANSFER_FAIL, GONE]), (1, [8, GONE]), (1, [8])
    )
    done = transfer(store.bounded(), is_put, *values(*[1] * 5))
    assert done == [8, 8, GONE, GONE, 8]
    assert store.calls == [["k0", "k1", "k2", "k3"], ["k0", "k2"], ["k4"]]
    # Not before Mooncake connects again.
    assert store.now > 10 + 1 + 1 + 1


def test_a_write_that_was_given_up_is_not_tried_again():
    """It may still be under way."""
    store = Store((60, [TRANSFER_FAIL]))
    assert put(store.bounded(), *values(1)) == [TRANSFER_FAIL]
    assert len(store.calls) == 1


def test_while_a_peer_is_gone_no_read_is_tried_twice():
    store = Store(*[(0, [TRANSFER_FAIL])] * 5)
    bounded = store.bounded()
    counts = []
    for pause in (0, 1, 1, 40):
        store.sleep(pause)
        before = len(store.calls)
        bounded.batch_get_into_multi_buffers(*values(1))
        counts.append(len(store.calls) - before)
    assert counts == [2, 1, 1, 2]


# Reads that were given up


def test_a_read_that_was_given_up_returns_when_another_has_come_through():
    store = Store((60, [8, TRANSFER_FAIL]), (60, [TRANSFER_FAIL]), (3, [8]))
    got = store.bounded().batch_get_into_multi_buffers(*values(1, 1))
    assert got == [8, TRANSFER_FAIL]
    assert store.calls == [["k0", "k1"], ["k1"], ["k1"]]
    # And whatever was under way on other lanes has been dropped.
    assert store.now == pytest.approx(60 + 60 + 1 + 3 + 12.5)


def test_a_read_that_failed_in_time_is_over():
    store = Store(*[(20, [TRANSFER_FAIL])] * 2)
    assert store.bounded().batch_get_into_multi_buffers(*values(1)) == [TRANSFER_FAIL]
    # Twice, and nothing else to wait for.
    assert 40 < store.now < 45


def test_a_value_that_is_gone_says_nothing_of_its_peer():
    store = Store((60, [TRANSFER_FAIL] * 2), (1, [GONE]), (1, [8]))
    store.bounded().batch_get_into_multi_buffers(*values(1, 1))
    assert store.calls == [["k0", "k1"], ["k0"], ["k1"]]


def test_a_peer_that_does_not_come_back_is_waited_for_ten_minutes(monkeypatch):
    errors = []
    monkeypatch.setattr(
        "vllm.junctions.store.transfers.logger.error",
        lambda text, *a: errors.append(text % a),
    )
    store = Store(*[(60, [TRANSFER_FAIL])] * 30)
    store.bounded().batch_get_into_multi_buffers(*values(1))
    assert 660 <= store.now < 730
    assert "has not answered for 600 s" in errors[0]


# Limits


def test_ours_are_set_where_the_environment_sets_none():
    environ = {"MC_TCP_LANES_PER_PEER": "8", "MC_TCP_STATUS_TIMEOUT_SEC": "20"}
    limits = TransferLimits.from_environment(environ)
    assert limits == TransferLimits(lanes=8, patience_seconds=20)
    assert environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "10"


@pytest.mark.parametrize("text", ["", "many", "0", "-3"])
def test_nonsense_counts_as_mooncakes_own(text):
    environ = {
        "MC_TCP_LANES_PER_PEER": text,
        "MC_TCP_STATUS_TIMEOUT_SEC": text,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": text,
    }
    assert TransferLimits.from_environment(environ) == TransferLimits(4, 30)


@pytest.mark.parametrize(
    ("num_threads", "expected"), [(1, 64), (2, 32), (3, 16), (50, 16)]
)
def test_the_more_threads_the_smaller_their_calls(num_threads, expected):
    assert TransferLimits(16, 10).max_transfers(num_threads) == expected

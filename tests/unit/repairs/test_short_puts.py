# SPDX-License-Identifier: Apache-2.0
"""Saves make calls of few transfers."""

from types import SimpleNamespace

import pytest

from vllm.junctions.repairs.short_puts import MAX_TRANSFERS, ShortPuts, shorten_puts

TRANSFER_FAIL = -800


class Store:
    """Answers calls from a script of ``(seconds, results)``; else all goes well."""

    def __init__(self, *script: tuple[float, list[int]]) -> None:
        self.now = 0.0
        self.calls: list[list[str]] = []
        self._script = list(script)

    def batch_put_from_multi_buffers(self, keys, addrs, sizes, config):
        self.calls.append(keys)
        seconds, results = self._script.pop(0) if self._script else (0, [0] * len(keys))
        self.now += seconds
        return results

    def put(self, *num_buffers: int, config=None) -> list[int]:
        """Put values with so many buffers each."""
        keys = [f"k{index}" for index in range(len(num_buffers))]
        parts = [[8] * count for count in num_buffers]
        short = ShortPuts(self, clock=lambda: self.now)
        return short.batch_put_from_multi_buffers(keys, parts, parts, config)


def test_no_call_has_more_transfers_than_the_queue_has_room_for():
    store = Store()
    assert store.put(*[40] * 256) == [0] * 256
    assert max(map(len, store.calls)) * 40 <= MAX_TRANSFERS
    assert [key for call in store.calls for key in call] == [
        f"k{index}" for index in range(256)
    ]


def test_puts_with_a_group_for_each_key_stay_whole():
    store = Store()
    config = SimpleNamespace(group_ids=["a"] * 256)
    assert store.put(*[40] * 256, config=config) == [0] * 256
    assert len(store.calls) == 1


def test_behind_a_peer_that_does_not_answer_nothing_is_tried():
    half = MAX_TRANSFERS // 2
    store = Store((60, [0, TRANSFER_FAIL]))
    assert store.put(*[half] * 4) == [0, *[TRANSFER_FAIL] * 3]
    assert len(store.calls) == 1


def test_behind_a_peer_that_is_gone_others_get_their_values():
    half = MAX_TRANSFERS // 2
    store = Store((1, [0, TRANSFER_FAIL]))
    assert store.put(*[half] * 4) == [0, TRANSFER_FAIL, 0, 0]


@pytest.mark.parametrize(("protocol", "short"), [("tcp", True), ("rdma", False)])
def test_only_puts_over_tcp_are_shortened(protocol, short):
    store = Store()
    worker = SimpleNamespace(kv_send_thread=SimpleNamespace(store=store))
    assert shorten_puts(worker, protocol) == short
    assert (worker.kv_send_thread.store is not store) == short


def test_a_worker_that_saves_nothing_is_left_alone():
    assert not shorten_puts(SimpleNamespace(kv_send_thread=None), "tcp")

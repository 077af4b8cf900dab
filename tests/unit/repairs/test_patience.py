# SPDX-License-Identifier: Apache-2.0
import pytest
import zmq

from vllm.junctions.repairs.patience import Patience
from vllm.junctions.repairs.silent_lookups import bounded


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _pauses(patience: Patience, clock: Clock, count: int) -> list[float]:
    """How long each of several timeouts in a row pauses lookups, in seconds."""
    pauses = []
    for _ in range(count):
        patience.timed_out()
        start = clock.now
        while patience.is_paused:
            clock.now += 0.5
        pauses.append(clock.now - start)
    return pauses


def test_lookups_are_sent_until_one_times_out(clock):
    patience = Patience(2.0, clock)
    assert not patience.is_paused
    patience.answered()
    assert not patience.is_paused


def test_pauses_double_up_to_a_minute(clock):
    assert _pauses(Patience(2.0, clock), clock, 6) == [8, 16, 32, 60, 60, 60]


def test_a_long_timeout_pauses_no_less_than_four_of_it(clock):
    assert _pauses(Patience(100.0, clock), clock, 3) == [400, 400, 400]


def test_an_answer_starts_over(clock):
    patience = Patience(2.0, clock)
    _pauses(patience, clock, 3)
    patience.answered()
    assert not patience.is_paused
    assert _pauses(patience, clock, 1) == [8]


def test_a_socket_is_bounded_within_the_block_only():
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect("inproc://nobody")
        socket.send(b"hello")
        with pytest.raises(zmq.Again), bounded(socket, 10):
            socket.recv()
        assert (socket.sndtimeo, socket.rcvtimeo) == (-1, -1)

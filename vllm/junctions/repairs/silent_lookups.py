# SPDX-License-Identifier: Apache-2.0
"""A lookup server that does not answer does not hold the scheduler for ever.

The stock client waits without a bound. Its request-reply socket takes no second
request before the answer to the first, and what reaches it late would be taken for
the answer to the next request: a lookup that is given up gives up its socket too.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from vllm.utils.network_utils import make_zmq_socket

from vllm.junctions.repairs.patience import Patience
from vllm.junctions.repairs.record import Repair
from vllm.junctions.seams.registry import Hook
from vllm.junctions.seams.switches import is_on

NAME = "silent_lookups"
DEFAULT_TIMEOUT_MS = 2_000
_CLIENT = (
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker:LookupKeyClient"
)
_WITHOUT_BOUND = -1
_PATIENCE = "lookup_patience"


class LookupTimeout(TimeoutError):
    """A lookup was not answered in time, or not sent behind one that was not."""


def _lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def lookup(self: Any, num_tokens: int, block_hashes: Any) -> Any:
        # On the client's own thread.
        if not is_on(self, NAME):
            return original(self, num_tokens, block_hashes)
        timeout_ms = getattr(self, "lookup_timeout_ms", DEFAULT_TIMEOUT_MS)
        patience = self.__dict__.setdefault(_PATIENCE, Patience(timeout_ms / 1000))
        if patience.is_paused:
            raise LookupTimeout
        try:
            with bounded(self.socket, timeout_ms):
                answer = original(self, num_tokens, block_hashes)
        except zmq.Again as error:
            patience.timed_out()
            _replace_socket(self)
            raise LookupTimeout from error
        patience.answered()
        return answer

    return lookup


@contextmanager
def bounded(socket: Any, timeout_ms: int) -> Iterator[None]:
    """Let sends and receives of a ZMQ socket raise ``zmq.Again`` after a while.

    Outside of the block the socket waits without a bound, as stock has it: a reset
    of the store takes as long as it takes.

    Args:
        socket: The socket.
        timeout_ms: Bound on one send and on one receive, in milliseconds.
    """
    options = (zmq.SNDTIMEO, zmq.RCVTIMEO)
    for option in options:
        socket.setsockopt(option, timeout_ms)
    try:
        yield
    finally:
        for option in options:
            socket.setsockopt(option, _WITHOUT_BOUND)


def _replace_socket(client: Any) -> None:
    # What is still on its way to the old one goes nowhere.
    path = client.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    client.socket.close(linger=0)
    client.socket = make_zmq_socket(client.ctx, path, zmq.REQ, bind=False)


REPAIR = Repair(
    name=NAME,
    fault=(
        "The scheduler waits without a bound for the answer to a lookup: while the "
        "lookup thread hangs or is dead, so does the engine."
    ),
    shown_by=(
        "tests/engine/test_faults.py::"
        "test_a_silent_lookup_channel_costs_hits_and_recovers"
    ),
    versions=("0.32.0", "0.33.0"),
    hooks=(
        Hook(
            target=f"{_CLIENT}._lookup",
            parameters=("num_tokens", "block_hashes"),
            why="One silent thread holds every request.",
            how="Bounds the wait, and pauses lookups after one that timed out.",
            remove_when="vLLM bounds the wait for lookups.",
            guarded_by="tests/engine/test_faults.py",
            replace=_lookup,
        ),
    ),
)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Lookup answers that do not come, or cannot be the request's."""

import threading
from types import SimpleNamespace

import pytest
import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    TailKeyBoundary,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol import (
    encode_lookup_response,
)

pytestmark = pytest.mark.cpu_test

HASHES = [b"0" * 8]


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """A client, and a peer that answers each lookup with the next payload.

    ``None`` stands for no answer.
    """
    path = f"ipc://{tmp_path}/lookup"
    monkeypatch.setattr(worker, "get_zmq_rpc_path_lookup", lambda _config: path)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"lookup_timeout_ms": 100}
        )
    )
    context = zmq.Context()
    peer = context.socket(zmq.ROUTER)
    peer.bind(path)
    client = worker.LookupKeyClient(config)

    def start(*payloads):
        def answer():
            for payload in payloads:
                identity, empty, *_ = peer.recv_multipart()
                if payload is not None:
                    peer.send_multipart([identity, empty, payload])

        threading.Thread(target=answer, daemon=True).start()
        return client

    yield start
    client.close()
    client.ctx.destroy(linger=0)
    context.destroy(linger=0)


def _payload(hit, *tails):
    entries = tuple(TailKeyBoundary(0, tokens) for tokens in tails)
    return encode_lookup_response(MooncakeLookupResult(hit, entries))


def test_an_answer_that_does_not_come_counts_as_no_hit(answering):
    client = answering(None)

    assert client.lookup("r", 64, HASHES).hit_length == 0


def test_lookups_pause_and_go_on(answering):
    client = answering(None, _payload(16, 16))
    client.lookup("r", 64, HASHES)
    assert client.lookup("r", 64, HASHES).hit_length == 0

    client._paused_until = 0.0

    assert client.lookup("r", 64, HASHES).hit_length == 16


@pytest.mark.parametrize(
    ("payload", "hit"),
    [
        (_payload(48, 48), 48),
        # The last token is always computed.
        (_payload(64, 64), 0),
        (_payload(48, 32), 0),
        (_payload(48, 80), 0),
        (b"\x00", 0),
    ],
)
def test_an_answer_that_cannot_be_the_requests_counts_as_no_hit(
    answering, payload, hit
):
    assert answering(payload).lookup("r", 64, HASHES).hit_length == hit


def test_an_exception_costs_the_hit_and_not_the_thread():
    class Failing:
        def lookup(self, _num_tokens, _block_hashes):
            raise RuntimeError("the store is gone")

    server = object.__new__(worker.LookupKeyServer)
    server.store_worker = Failing()

    assert server._lookup(64, HASHES) == MooncakeLookupResult(0)

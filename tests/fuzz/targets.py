# SPDX-License-Identifier: Apache-2.0
"""What fuzzing feeds, and what must hold of it whatever it is fed.

Hypothesis (``test_fuzz.py``) and the coverage-guided fuzzer (``tools/fuzz.py``) use
the same two targets.
"""

import struct
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    TailKeyBoundary,
)

from vllm.junctions.config import REPAIR_NAMES, JunctionsConfig
from vllm.junctions.errors import ConfigurationError
from vllm.junctions.lookup.client import JunctionLookupClient
from vllm.junctions.lookup.wire import (
    JUNCTION_GROUP_ID,
    HitUnits,
    JunctionLookupResult,
)


class _Wire:
    """Takes the place of the socket: whatever is asked, ``payload`` comes back."""

    payload = b""

    def setsockopt(self, _option: int, _value: int) -> None:
        pass

    def send_multipart(self, _frames: Any, copy: bool = True) -> None:
        pass

    def recv(self) -> bytes:
        return self.payload


class _Inline:
    """Takes the place of the client's thread."""

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done


class LookupClient:
    """The real lookup client on a wire that the fuzzer holds."""

    def __init__(self) -> None:
        config: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
            parallel_config=SimpleNamespace(data_parallel_index=0),
        )
        self._client = JunctionLookupClient(config)
        self._client.socket.close(linger=0)
        self._client.socket = self._wire = _Wire()
        self._client.executor.shutdown()
        self._client.executor = _Inline()

    def check(self, payload: bytes, num_tokens: int, units: HitUnits) -> bool:
        """Decode an answer; return whether it was taken.

        Raises:
            AssertionError: It was taken and cannot be the request's, or refused
                although it could, or something else came of it than is counted.
        """
        client, counters = self._client, self._client.counters
        refused, dropped = counters.malformed_payloads, counters.dropped_entries
        client.hit_units = units
        self._wire.payload = payload
        result = client.lookup("r", num_tokens, [])
        junctions = client.take_junctions("r")

        wanted = _expected(payload, num_tokens, units)
        assert client.take_junctions("r") is None
        assert counters.malformed_payloads - refused == (wanted is None)
        if wanted is None:
            assert (result.hit_length, result.tail_key_boundaries) == (0, ())
            assert junctions is None
            return False
        assert result == wanted, (result, wanted)
        assert junctions == wanted.junctions
        assert counters.dropped_entries - dropped == wanted.num_dropped
        return True


def _expected(
    payload: bytes, num_tokens: int, units: HitUnits
) -> JunctionLookupResult | None:
    """Read an answer by the format's definition; None if it is to be refused."""
    if len(payload) % 8 != 4:
        return None
    (hit,) = struct.unpack_from(">I", payload)
    entries = list(struct.iter_unpack(">II", payload[4:]))
    if hit and (hit >= num_tokens or hit % units.hit):
        return None
    tails = [entry for entry in entries if entry[0] != JUNCTION_GROUP_ID]
    for _, tokens in tails:
        block_end = -(-hit // units.block_size) * units.block_size
        if not 0 < hit <= tokens <= block_end or tokens > num_tokens:
            return None
        if tokens % units.hash_block_size:
            return None
    junctions = [tokens for group, tokens in entries if group == JUNCTION_GROUP_ID]
    inside = [tokens for tokens in junctions if 1 <= tokens <= num_tokens]
    return JunctionLookupResult(
        hit,
        tuple(TailKeyBoundary(group, tokens) for group, tokens in tails),
        tuple(sorted(set(inside))),
        len(junctions) - len(inside),
    )


def check_config(extra_config: dict[Any, Any]) -> bool:
    """Read settings; return whether they were accepted.

    Raises:
        AssertionError: They were accepted and are not what was given, or refused
            with a message that does not name the key.
    """
    try:
        config = JunctionsConfig.from_extra_config(extra_config)
    except ConfigurationError as error:
        if not any(repr(key) in str(error) for key in extra_config):
            raise AssertionError("the message names no key") from error
        return False
    ours = {
        key: value
        for key, value in extra_config.items()
        if isinstance(key, str) and key.startswith("junction")
    }
    known = {field.name for field in msgspec.structs.fields(JunctionsConfig)}
    assert ours.keys() <= known
    assert set(config.repairs()) <= set(REPAIR_NAMES)
    assert ours.get("junctions", True) is config.junctions
    assert type(config.junctions_lookup_timeout_ms) is int
    assert 1 <= config.junctions_lookup_timeout_ms <= 3_600_000
    if "junctions_lookup_timeout_ms" in ours:
        timeout = ours["junctions_lookup_timeout_ms"]
        assert timeout == config.junctions_lookup_timeout_ms
    return True

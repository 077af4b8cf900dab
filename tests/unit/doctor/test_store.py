# SPDX-License-Identifier: Apache-2.0
"""The store's checks, with a Mooncake client that behaves as the test says."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.junctions.doctor.findings import Finding
from vllm.junctions.doctor.store import check_store

_CLIENT = """
import sys, time
class MooncakeDistributedStore:
    def __init__(self):
        self.values = {{}}
    def setup(self, *args, **kwargs):
        print("a line of the client's log")
        print("E0 client:", *args, kwargs, file=sys.stderr)
        {setup}
        return 0
    def put(self, key, value):
        assert key.startswith("vllm-junctions-doctor/")
        self.values[key] = value
        return {put}
    def get(self, key):
        return {get}
    def remove(self, key, force):
        return 0 if force and self.values.pop(key, None) else -1
    def close(self):
        pass
"""


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Puts a client with given behaviour in the way of the real one."""

    def make(
        setup: str = "pass", put: str = "0", get: str = "self.values[key]"
    ) -> None:
        package = tmp_path / "path" / "mooncake"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        code = _CLIENT.format(setup=setup, put=put, get=get)
        (package / "store.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(package.parent))

    return make


@pytest.fixture
def listener() -> Iterator[str]:
    """Address of something that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _configure(tmp_path: Path, monkeypatch, address: str, **more) -> None:
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": address,
        "protocol": "tcp",
        **more,
    }
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))


def _lines(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level.value, finding.subject) for finding in findings]


def test_a_store_that_works(tmp_path, monkeypatch, client, listener):
    client()
    _configure(tmp_path, monkeypatch, listener)
    found = list(check_store())
    assert _lines(found) == [
        ("ok", "Mooncake config"),
        ("ok", "master"),
        ("ok", "round trip"),
    ]
    assert found[-1].text.startswith("put, get and remove in ")


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ({"put": "-200"}, "put failed with -200"),
        ({"get": "b'other'"}, "get returned 5 bytes that are not those put"),
        ({"setup": "return -600"}, "the client could not be set up (-600)"),
        ({"setup": "raise SystemExit(9)"}, "the client died"),
    ],
)
def test_a_round_trip_that_fails_says_where(
    tmp_path, monkeypatch, client, listener, behaviour, text
):
    client(**behaviour)
    _configure(tmp_path, monkeypatch, listener, tenant_id="mine")
    found = list(check_store())[-1]
    assert (found.level.value, found.text) == ("FAIL", text)
    assert "{'tenant_id': 'mine'}" in found.mend


def test_a_client_that_hangs_is_given_up(tmp_path, monkeypatch, client, listener):
    client(setup="time.sleep(600)")
    _configure(tmp_path, monkeypatch, listener)
    found = list(check_store(round_trip_seconds=0.5))[-1]
    assert (found.level.value, found.subject) == ("FAIL", "round trip")
    assert "took over 0.5 s" in found.text


def test_an_unreachable_master_ends_the_checks(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    _configure(tmp_path, monkeypatch, address)
    found = list(check_store())
    assert _lines(found) == [("ok", "Mooncake config"), ("FAIL", "master")]
    assert address in found[-1].text
    assert "start mooncake_master" in found[-1].mend


def test_a_master_behind_another_service_is_left_to_the_round_trip(
    tmp_path, monkeypatch, client
):
    client()
    _configure(tmp_path, monkeypatch, "etcd://127.0.0.1:2379")
    assert _lines(list(check_store()))[1:] == [("warn", "master"), ("ok", "round trip")]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"mode": "other"}'])
def test_a_configuration_that_cannot_be_used(tmp_path, monkeypatch, content):
    path = tmp_path / "mooncake.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    assert _lines(list(check_store())) == [("FAIL", "Mooncake config")]


def test_a_configuration_that_is_not_named(monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    (found,) = check_store()
    assert found.level.value == "FAIL"

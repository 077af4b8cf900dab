# SPDX-License-Identifier: Apache-2.0
"""Real stores and real servers, started once for all tests that share them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.models import GEMMA3, TinyModel
from benchmarks.testbed.server import VllmServer
from benchmarks.testbed.store import MooncakeMaster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def master(tmp_path_factory) -> Iterator[MooncakeMaster]:
    """One store for the session; tests use prompts of their own."""
    with MooncakeMaster(tmp_path_factory.mktemp("master")) as master:
        yield master


ServerMaker = Callable[..., VllmServer]


@pytest.fixture(scope="session")
def make_server(tmp_path_factory) -> Iterator[ServerMaker]:
    """Makes servers that end with the session; ``start()`` is the caller's."""
    servers: list[VllmServer] = []

    def make(model: TinyModel = GEMMA3, **kwargs) -> VllmServer:
        work_dir = tmp_path_factory.mktemp("server")
        server = VllmServer(model.write(work_dir), work_dir, **kwargs)
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def trio(master, make_server) -> dict[str, VllmServer]:
    """Three servers of one model, started side by side.

    ``one`` and ``two`` share the store, with junctions; ``cold`` has no connector.
    """
    config = master.write_client_config()
    servers = {
        "one": make_server(mooncake_config=config),
        "two": make_server(mooncake_config=config),
        "cold": make_server(),
    }
    for server in servers.values():
        server.start(wait=False)
    for server in servers.values():
        server.wait_ready()
    return servers

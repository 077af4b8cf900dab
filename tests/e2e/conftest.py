# SPDX-License-Identifier: Apache-2.0
"""Real stores and real servers, started once for all tests that share them."""

import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from testbed.chat import write_tokenizer
from testbed.models import GEMMA3, TinyModel
from testbed.server import VllmServer, serving
from testbed.starvation import StarvationWatch
from testbed.store import MooncakeMaster
from tests.e2e.client import REPETITION_VARIABLE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


# Set by tools/repeat_e2e.py.
_REPEATS_VARIABLE = "JUNCTIONS_E2E_REPEATS"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    repeats = int(os.environ.get(_REPEATS_VARIABLE, "1"))
    if repeats > 1:
        metafunc.parametrize("_repetition", range(1, repeats + 1), indirect=True)


@pytest.fixture(autouse=True)
def _repetition(request, monkeypatch) -> None:
    if number := getattr(request, "param", None):
        monkeypatch.setenv(REPETITION_VARIABLE, f"-{number}")


_SERVERS = pytest.StashKey[list[VllmServer]]()
_WATCH = pytest.StashKey[StarvationWatch]()
_TELLING = re.compile(r"\b(?:WARNING|ERROR)\b|^E\d{4} |Traceback|Error\b")
_LINES_SHOWN = 40


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure, show what the servers complained about last, and who starved."""
    report = yield
    if report.failed:
        if watch := item.config.stash.get(_WATCH, None):
            longest = watch.longest(since=time.monotonic() - call.duration)
            text = str(longest or "no thread of ours for a second or more")
            report.sections.append(("longest wait for a processor", text))
        for server in item.config.stash.get(_SERVERS, []):
            if server.process is not None:
                lines = [
                    one for one in server.log().splitlines() if _TELLING.search(one)
                ]
                text = "\n".join(lines[-_LINES_SHOWN:])
                report.sections.append((f"server on port {server.port}", text))
    return report


@pytest.fixture(scope="session", autouse=True)
def _starvation_watch(pytestconfig) -> Iterator[None]:
    with StarvationWatch(os.getpid()) as pytestconfig.stash[_WATCH]:
        yield


# A server that ends leaves its segment in the master's books for a while, and puts
# that land there fail: servers that come and go need a store of their own.
@pytest.fixture(scope="session")
def shared_master(tmp_path_factory) -> Iterator[MooncakeMaster]:
    """The store of ``trio``; tests use prompts of their own."""
    with MooncakeMaster(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture(scope="module")
def master(tmp_path_factory) -> Iterator[MooncakeMaster]:
    """A store for the tests of one module."""
    with MooncakeMaster(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture
def fresh_master(tmp_path) -> Iterator[MooncakeMaster]:
    """A store for one test."""
    with MooncakeMaster(tmp_path / "master") as master:
        yield master


ServerMaker = Callable[..., VllmServer]


@pytest.fixture(scope="session")
def make_server(tmp_path_factory, pytestconfig) -> Iterator[ServerMaker]:
    """Makes servers that end with the session; ``start()`` is the caller's."""
    servers: list[VllmServer] = pytestconfig.stash.setdefault(_SERVERS, [])

    def make(
        model: TinyModel = GEMMA3, weights_seed: int | None = None, **kwargs
    ) -> VllmServer:
        work_dir = tmp_path_factory.mktemp("server")
        arguments = model.write(work_dir, weights_seed)
        env = {**model.env(work_dir), **kwargs.pop("env", {})}
        server = VllmServer(arguments, work_dir, env=env, **kwargs)
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()


_CHATTING = ("--no-skip-tokenizer-init", "--enable-prompt-tokens-details")


@pytest.fixture(scope="session")
def trio(shared_master, make_server) -> Iterator[dict[str, VllmServer]]:
    """Three servers of one model, started side by side.

    ``one`` and ``two`` share the store, with junctions, and take chats; ``cold`` has
    no connector.
    """
    config = shared_master.write_client_config()
    servers = {
        "one": make_server(
            mooncake_config=config, weights_seed=1, server_args=_CHATTING
        ),
        "two": make_server(
            mooncake_config=config, weights_seed=1, server_args=_CHATTING
        ),
        "cold": make_server(weights_seed=1),
    }
    for name in ("one", "two"):
        write_tokenizer(Path(servers[name].model))
    with serving(*servers.values()):
        yield servers

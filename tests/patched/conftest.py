# SPDX-License-Identifier: Apache-2.0
"""Tests of a vLLM that has the in-tree series; skipped where there is none.

``make test-patched`` sets the process up. Two processes can compare keys only with
the same root of the hash chain.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("PYTHONHASHSEED", "0")

from testbed.box.config import is_patched
from tests.property import conftest as _laws  # noqa: F401
from tests.property.elsewhere import Elsewhere
from tools.vllm_tree import runtime

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if is_patched():
        return
    skip = pytest.mark.skip(reason="needs a patched vLLM: make test-patched")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def unpatched() -> Iterator[Elsewhere]:
    """The same release of vLLM as this process's, without the series."""
    from vllm.version import __version__

    with Elsewhere(str(runtime(__version__.split("+")[0]))) as elsewhere:
        yield elsewhere

# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest

from tests.support import uninstall_hooks
from vllm.junctions.core import CORE_HOOKS, HookSet


@pytest.fixture(autouse=True)
def _no_hooks_from_others() -> None:
    """Engines of other tests in this process leave the hooks on."""
    uninstall_hooks()


@pytest.fixture
def core_hooks() -> Iterator[HookSet]:
    """The hooks into core, on for one test."""
    CORE_HOOKS.install()
    try:
        yield CORE_HOOKS
    finally:
        CORE_HOOKS.uninstall()

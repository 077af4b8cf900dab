# SPDX-License-Identifier: Apache-2.0
"""Engines of another connector and of none, in the process of an engine of ours."""

from contextlib import closing

import pytest

from testbed.box import Box, EngineOptions, Neighbour
from tests.engine.layouts import FULL_SWA_EAGLE, siblings
from tests.support import uninstall_hooks
from vllm.junctions import repairs
from vllm.junctions.core import CORE_HOOKS

PROMPTS, _ = siblings(FULL_SWA_EAGLE)


@pytest.mark.parametrize("connector", ["DecodeBenchConnector", None])
def test_other_engines_schedule_and_keep_what_they_do_on_stock(connector) -> None:
    uninstall_hooks()

    def serve() -> Neighbour:
        neighbour = Neighbour(FULL_SWA_EAGLE, EngineOptions(), connector)
        with closing(neighbour):
            for prompt in PROMPTS:
                neighbour.serve(prompt)
        return neighbour

    alone = serve()
    with Box(FULL_SWA_EAGLE, EngineOptions(side="on")) as box:
        engine = box.engine()
        for name, prompt in zip("ABCD", PROMPTS, strict=True):
            engine.serve(prompt, name)
        assert CORE_HOOKS.installed
        assert repairs.HOOKS.installed
        beside = serve()
    assert beside.steps == alone.steps

# SPDX-License-Identifier: Apache-2.0
"""The box on a real ``mooncake_master``: its stand-in must not flatter anybody."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.box import Box, EngineOptions, Layout
from benchmarks.testbed.store import MooncakeMaster
from tests.engine.layouts import FULL_MAMBA, FULL_SWA_EAGLE, siblings

pytestmark = pytest.mark.e2e


@pytest.fixture
def mooncake_config(tmp_path: Path) -> Iterator[Path]:
    with MooncakeMaster(tmp_path) as master:
        yield master.write_client_config(16 << 20, 16 << 20)


@pytest.mark.parametrize("layout", [FULL_SWA_EAGLE, FULL_MAMBA])
def test_siblings_hit_as_on_the_stand_in(layout: Layout, mooncake_config: Path) -> None:
    prompts, _ = siblings(layout)
    hits = {}
    for store, config in (("stand-in", None), ("real", mooncake_config)):
        with Box(layout, EngineOptions(), mooncake_config=config) as box:
            engine = box.engine()
            hits[store] = []
            for index, prompt in enumerate(prompts):
                engine.reset_local_cache()
                served = engine.serve(prompt, str(index))
                hits[store].append(served.store_hit_tokens)

    assert hits["real"] == hits["stand-in"]
    assert hits["real"][-1] > 0

# SPDX-License-Identifier: Apache-2.0
"""The box on a real ``mooncake_master``: its stand-in must not flatter anybody."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.box import Box, BoxEngine, EngineOptions, Layout
from testbed.store import MooncakeMaster, StoreClient
from tests.engine.health import assert_nothing_left, counters
from tests.engine.layouts import FULL_MAMBA, FULL_SWA, FULL_SWA_EAGLE, Tokens, siblings

pytestmark = pytest.mark.e2e

RECOMPUTE = EngineOptions(load_failure_policy="recompute")


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path) as master:
        yield master


@pytest.fixture
def mooncake_config(master: MooncakeMaster) -> Path:
    return master.write_client_config(16 << 20, 16 << 20)


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


@pytest.mark.parametrize(
    "moment", ["before a lookup", "during a load", "during a save"]
)
def test_a_master_that_dies_costs_hits_until_it_is_back(
    moment: str, master: MooncakeMaster, mooncake_config: Path
) -> None:
    """Stands on Mooncake's client, which fails calls and mounts its segment anew.

    That a failed load is reported, and a failed save releases its blocks, stands on
    vLLM's transfer threads.
    """
    prompts, _ = siblings(FULL_SWA)
    with Box(FULL_SWA, RECOMPUTE, mooncake_config=mooncake_config) as box:
        engine = box.engine()
        for name, prompt in zip("AB", prompts, strict=False):
            engine.serve(prompt, name)
            engine.reset_local_cache()
        gate = engine.saves if moment == "during a save" else engine.loads
        if moment != "before a lookup":
            gate.hold()
            engine.add(prompts[2], "C")
            engine.step()
        master.kill()
        if moment == "before a lookup":
            engine.add(prompts[2], "C")
        gate.release()
        engine.run()

        assert engine.served["C"].finish_reason == "length"
        assert counters(engine)["failed_loads"] == (moment == "during a load")
        assert_nothing_left(engine)
        master.start()
        wait_until_hits(engine)
        assert_nothing_left(engine)


def wait_until_hits(engine: BoxEngine) -> None:
    """Serve prompts twice until the store, which is empty now, takes them again."""
    tokens = Tokens(seed=1)
    for attempt in range(60):
        prompt = tokens(97)
        engine.serve(prompt, f"new {attempt}")
        engine.reset_local_cache()
        again = engine.serve(prompt, f"again {attempt}")
        engine.reset_local_cache()
        if again.store_hit_tokens == 96:
            return
        time.sleep(0.5)
    pytest.fail("the store is back, and nothing hits")


@pytest.mark.parametrize("change", [-4, 8])
def test_a_value_of_the_wrong_size_is_never_loaded_as_kv(
    change: int, master: MooncakeMaster, mooncake_config: Path
) -> None:
    prompt = Tokens()(97)
    with Box(FULL_SWA, RECOMPUTE, mooncake_config=mooncake_config) as box:
        engine = box.engine()
        engine.serve(prompt, "A")
        engine.reset_local_cache()
        (key,) = [
            key
            for key in sorted(master.keys())
            if "@group:1@" in key and box.book.prefix_tokens(key) == 96
        ]
        with StoreClient(master) as client:
            value = client.get(key)
            client.overwrite(key, (value + bytes(8))[: len(value) + change])
        served = engine.serve(prompt, "B")

        assert (served.finish_reason, served.store_hit_tokens) == ("length", 0)
        assert counters(engine)["failed_loads"] == 2
        assert_nothing_left(engine)

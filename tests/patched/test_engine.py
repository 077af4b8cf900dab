# SPDX-License-Identifier: Apache-2.0
"""What the overlay's engine tests hold of junctions, on a patched vLLM.

Further engine tests, those that need nothing of this package, run there as they are:
``tools/series/check.py`` names them.
"""

import pytest

from benchmarks import seed_table
from testbed.box import Box, EngineOptions, Group, Layout
from tests.engine.layouts import FULL_SWA, Tokens

FULL_ONLY = Layout((Group("full", 16),), hash_tokens=16)


@pytest.mark.parametrize("row", seed_table.EXPECTED)
@pytest.mark.parametrize(
    "tail_tokens", [seed_table.TAIL_TOKENS, seed_table.LUCKY_TAIL_TOKENS]
)
def test_the_seed_table(row: tuple[int, int, int], tail_tokens: int) -> None:
    diverge_tokens, sibling, again = row

    rows = seed_table.run_side("on", diverge_tokens, tail_tokens)

    assert {row.name: row.store_hit_tokens for row in rows} == {
        "A": 0,
        "B": 0,
        "C": sibling,
        "D": sibling,
        "A again": again,
    }


def test_padding_rows_are_not_stored() -> None:
    tokens = Tokens()
    layout = Layout(
        (Group("full", 2), Group("swa", 2, 3)), hash_tokens=2, drops_eagle_block=True
    )
    with Box(layout) as box:
        engine = box.engine()
        engine.add(tokens(1), "decoding", max_tokens=2)
        engine.step()
        engine.client.saves.hold()
        engine.add(tokens(1), "padded")
        engine.run_requests()
        engine.client.saves.release()
        engine.run()

        assert box.faults() == []


@pytest.mark.parametrize("layout", [FULL_SWA, FULL_ONLY])
def test_a_large_request_whose_load_failed_does_not_wait_for_itself(
    layout: Layout,
) -> None:
    prompt = Tokens()(97)
    options = EngineOptions(
        num_blocks=10 * len(layout.groups), load_failure_policy="recompute"
    )
    with Box(layout, options) as box:
        box.engine().serve(prompt, "A")
        engine = box.engine()
        box.store.fail_gets(0, count=1)
        engine.add(prompt, "B")
        engine.run()

        assert engine.served["B"].finish_reason == "length"
        assert box.faults() == []


@pytest.mark.parametrize("num_stored_tokens", [0, 64])
def test_a_forced_reset_loses_no_request(num_stored_tokens: int) -> None:
    """Resumed with and without a load in the pass that reports the preemption."""
    prompt = Tokens()(100)
    with Box(FULL_SWA) as box:
        if num_stored_tokens:
            box.engine().serve(prompt[: num_stored_tokens + 1], "stored")
        engine = box.engine()
        served = engine.add(prompt, "a", max_tokens=50)
        for _ in range(5):
            engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.run()

        assert served.finish_reason == "length"
        assert box.faults() == []


def test_nothing_of_the_overlay_is_here() -> None:
    """The figures of this process are the series' alone."""
    import sys

    with Box(FULL_SWA) as box:
        box.engine().serve(Tokens()(100), "A")

    hooks = sys.modules.get("vllm.junctions.core")
    assert hooks is None or not hooks.CORE_HOOKS.installed

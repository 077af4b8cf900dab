# SPDX-License-Identifier: Apache-2.0
"""Resets of the local cache while requests run."""

import pytest

from testbed.box import Box, EngineOptions
from tests.engine.layouts import FULL_SWA, Tokens

_STOCKS_FAULT = pytest.mark.xfail(
    strict=True,
    reason="vLLM resumes in the scheduling pass that reports the preemption, and the "
    "store's scheduler then drops what it has just noted for the load",
)


@pytest.mark.parametrize(
    ("side", "forced"),
    [
        ("stock", False),
        pytest.param("stock", True, marks=_STOCKS_FAULT),
        ("on", False),
        ("on", True),
    ],
)
def test_a_reset_loses_no_running_request(side, forced):
    with Box(FULL_SWA, EngineOptions(side=side)) as box:
        engine = box.engine()
        served = engine.add(Tokens()(100), "a", max_tokens=50)
        for _ in range(5):
            engine.step()
        done = engine.scheduler.reset_prefix_cache(reset_running_requests=forced)
        # A request holds blocks: only a forced reset gets hold of them.
        assert done == forced
        for _ in range(100):
            engine.step()
        assert served.finish_reason == "length"

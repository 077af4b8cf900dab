# SPDX-License-Identifier: Apache-2.0
"""The laws that hold between a patched vLLM and an unpatched one."""

from typing import Any

from hypothesis import given
from vllm.version import __version__

from tests.property.elsewhere import Elsewhere
from tests.property.scenarios import Scenario, quiet_scenarios, rough_scenarios
from tests.property.test_laws import assert_nothing_dense, stored, traces

# Under EAGLE, 0.33 also keeps the proof block at the hit below a junction; the overlay
# cannot take that away, the series needs it no more. So other blocks are free.
_KEEPS_ONE_MORE = __version__.startswith("0.33.")


@given(scenario=quiet_scenarios())
def test_nothing_dense(unpatched: Elsewhere, scenario: Scenario) -> None:
    """What is stored beyond stock's are tails at junctions, and nothing is less."""
    stock = unpatched.observe(stored, scenario, "stock")

    assert_nothing_dense(scenario, stock, stored(scenario, "on"))


@given(scenario=rough_scenarios())
def test_the_overlay_agrees(unpatched: Elsewhere, scenario: Scenario) -> None:
    """Keys put, hits and block tables are those of the overlay, step by step."""
    overlay = unpatched.observe(traces, scenario, "on")

    assert _comparable(traces(scenario, "on")) == _comparable(overlay)


def _comparable(trace: tuple) -> tuple:
    *others, steps = trace
    if not _KEEPS_ONE_MORE:
        return trace
    return *others, [[_without_ids(step) for step in engine] for engine in steps]


def _without_ids(step: Any) -> tuple:
    """Return a step with block tables that say where there is a block, not which."""
    tables = {
        request: tuple([block != 0 for block in group] for group in table)
        for request, table in step.block_tables.items()
    }
    return step.num_scheduled_tokens, tables

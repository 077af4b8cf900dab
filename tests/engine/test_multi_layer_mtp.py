# SPDX-License-Identifier: Apache-2.0
"""Drafters of several layers (vLLM 0.33) keep tokens below each window.

They compute the last few prompt tokens anew, so a hit restores these as well: tails are
longer by as much, in lookups, loads, and at junctions.
"""

from dataclasses import replace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import coordinator

from testbed.box import Box, EngineOptions, Layout
from tests.engine.layouts import FULL_SWA_EAGLE, MLA_SWA_MIXED, siblings

pytestmark = pytest.mark.skipif(
    not hasattr(coordinator, "_coverage_spec"),
    reason="this vLLM's store knows of nothing below a window",
)


def retaining(layout: Layout, num_tokens: int) -> Layout:
    return replace(
        layout,
        drops_eagle_block=True,
        groups=tuple(
            replace(group, retained_tokens=num_tokens if group.window_tokens else 0)
            for group in layout.groups
        ),
    )


def group_tails(box: Box, group_id: int, position: int) -> set[int]:
    """Return where blocks of a group end that are stored up to a position."""
    ends = (
        box.book.prefix_tokens(key)
        for key in box.store.values
        if f"@group:{group_id}@" in key
    )
    return {end for end in ends if end <= position}


@pytest.mark.parametrize("chunk_tokens", [64, 8192])
@pytest.mark.parametrize("retained_tokens", [1, 3, 17])
@pytest.mark.parametrize("layout", [FULL_SWA_EAGLE, MLA_SWA_MIXED])
def test_siblings_hit_with_what_the_drafter_computes_anew(
    layout: Layout, retained_tokens: int, chunk_tokens: int
) -> None:
    layout = retaining(layout, retained_tokens)
    # With EAGLE a hit needs a shared scheduler block above it.
    prompts, shared_tokens = siblings(layout)
    hit_tokens = shared_tokens - layout.scheduler_block_tokens
    options = EngineOptions(max_batched_tokens=chunk_tokens)
    with Box(layout, options) as box:
        served = [
            box.engine().serve(prompt, name)
            for name, prompt in zip("ABCD", prompts, strict=True)
        ]
        window = layout.groups[1]
        ends = group_tails(box, 1, hit_tokens)
        assert [one.store_hit_tokens for one in served] == [
            0,
            0,
            hit_tokens,
            hit_tokens,
        ]
        # The tail reaches down to the oldest token that is computed anew.
        oldest = hit_tokens - window.window_tokens + 1 - retained_tokens
        first = oldest // window.block_tokens * window.block_tokens
        assert set(range(hit_tokens, first, -window.block_tokens)) <= ends
        assert box.faults() == []


def test_junctions_off_hits_nothing_here_either() -> None:
    layout = retaining(FULL_SWA_EAGLE, 3)
    prompts, _ = siblings(layout)
    with Box(layout, EngineOptions(side="off")) as box:
        served = [
            box.engine().serve(prompt, name)
            for name, prompt in zip("ABCD", prompts, strict=True)
        ]
        assert [one.store_hit_tokens for one in served] == [0, 0, 0, 0]

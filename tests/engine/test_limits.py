# SPDX-License-Identifier: Apache-2.0
"""Where junctions make a replay worse than stock's: known, and not mended."""

import pytest

from benchmarks.seed_table import LAYOUT
from testbed.box import Box, EngineOptions, Side
from tests.engine.layouts import Tokens

_BLOCK = LAYOUT.scheduler_block_tokens
_SHARED = 16 * _BLOCK


def hits_of_a_replay_elsewhere(side: Side) -> tuple[int, int]:
    """Serve a sibling that ends within the block past a junction, and its replay.

    Returns:
        What it hits where the junction was found, and on a fresh instance.
    """
    tokens = Tokens()
    shared = tokens(_SHARED)
    first, second = shared + tokens(800), shared + tokens(810)
    # It shares what proves the junction at 3840, and ends before 4096.
    short = shared[:-100] + tokens(20)
    with Box(LAYOUT, EngineOptions(side=side)) as box:
        one = box.engine()
        one.serve(first, "first")
        one.serve(second, "second")
        before = one.serve(short, "short")
        again = box.engine().serve(short, "again")
        assert box.faults() == []
    return before.local_hit_tokens, again.store_hit_tokens


def test_a_replay_on_stock_hits_its_own_tail() -> None:
    assert hits_of_a_replay_elsewhere("stock") == (0, _SHARED - 2 * _BLOCK)


@pytest.mark.xfail(strict=True, reason="the local hit leaves no tail of its own")
def test_a_replay_of_what_hit_locally_within_a_block_hits_as_on_stock() -> None:
    """A lookup ends at a whole block, so it cannot prove 3840 as the local cache does.

    What a replay could hit is the tail at 3584, and that was never computed.
    """
    local, replay = hits_of_a_replay_elsewhere("on")
    assert local == _SHARED - _BLOCK
    assert replay >= _SHARED - 2 * _BLOCK

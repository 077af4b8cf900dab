# SPDX-License-Identifier: Apache-2.0
"""Small layouts, and prompts for them."""

import random

from testbed.box import Group, Layout

FULL_SWA = Layout((Group("full", 16), Group("swa", 16, 32)), hash_tokens=16)
FULL_SWA_EAGLE = Layout(
    (Group("full", 16), Group("swa", 16, 32), Group("full", 16, eagle=True)),
    hash_tokens=16,
    drops_eagle_block=True,
)
MLA_SWA_MIXED = Layout(
    (Group("mla", 64), Group("swa_mla", 16, 32), Group("swa", 4, 8)), hash_tokens=4
)
FULL_MAMBA = Layout((Group("full", 16), Group("mamba", 16)), hash_tokens=16)
FULL_MAMBA_EAGLE = Layout(
    (Group("full", 16, eagle=True), Group("mamba", 16)),
    hash_tokens=16,
    drops_eagle_block=True,
)
FULL_MAMBA_PARTIAL = Layout(
    (Group("full", 32), Group("mamba", 32)),
    hash_tokens=16,
    mamba_junction_checkpoints=True,
)

SPARSE_LAYOUTS = {
    "full+swa": FULL_SWA,
    "full+swa+eagle draft": FULL_SWA_EAGLE,
    "mla+swa of three block sizes": MLA_SWA_MIXED,
    "full+mamba": FULL_MAMBA,
    "full+mamba+eagle": FULL_MAMBA_EAGLE,
    "full+mamba, partial hits": FULL_MAMBA_PARTIAL,
}


class Tokens:
    """Token ids that never repeat by chance within a test."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def __call__(self, count: int) -> list[int]:
        return [self._random.randrange(1, 1 << 20) for _ in range(count)]


def siblings(layout: Layout, shared_blocks: int = 6, extra_tokens: int = 0):
    """Return four prompts that share scheduler blocks, and how many tokens.

    Each reaches at least two scheduler blocks and one token past the shared ones,
    so that no replay tail of its own lies on the junction.
    """
    tokens = Tokens()
    block = layout.scheduler_block_tokens
    shared = tokens(shared_blocks * block + extra_tokens)
    first = shared + tokens(4 * block + 3)
    rest = [shared + tokens(3 * block + 1 + index) for index in range(3)]
    return [first, *rest], len(shared)

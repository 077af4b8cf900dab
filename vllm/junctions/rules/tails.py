# SPDX-License-Identifier: Apache-2.0
"""Which blocks a sparse group needs for a hit: arithmetic alone.

A sliding-window or Mamba group can be reused at a position if it has the *tail*
there: the blocks that reach into the window, one more above the position under
EAGLE, the state for Mamba. Nothing in this module knows about vLLM's objects.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd


@dataclass(frozen=True)
class TailShape:
    """The tail of one group, in blocks of that group.

    A *candidate* is the index of the highest block of a tail; -1 and below mean that
    there is none. Blocks of 64 tokens, hits in steps of 256, a window of 128 and
    EAGLE: the tail at 512 tokens is blocks 6, 7 and the proof block 8, so the
    candidate is 8, and the one below it is 4.

    Source: what ``SlidingWindowManager.find_longest_cache_hit`` and
    ``MambaManager.find_longest_cache_hit`` accept as a match.

    Attributes:
        block_tokens: Tokens between two positions that can have a key.
        alignment_tokens: Tokens that a hit is a multiple of.
        num_blocks: Blocks of a tail, without and with the EAGLE drop.
        drops: Whether the group drops its last matched block for a drafter.
    """

    block_tokens: int
    alignment_tokens: int
    num_blocks: tuple[int, int]
    drops: bool = False

    @cached_property
    def step(self) -> int:
        """Blocks from one candidate to the next."""
        return self.alignment_tokens // gcd(self.alignment_tokens, self.block_tokens)

    def highest(self, num_blocks: int, drop: bool) -> int:
        """Return the highest candidate among the first ``num_blocks`` blocks."""
        candidate = num_blocks - 1
        return candidate - (candidate + 1 - drop) % self.step

    def window(self, candidate: int, drop: bool) -> tuple[int, int]:
        """Return ``(first, end)`` of the blocks that a candidate needs."""
        return max(candidate + 1 - self.num_blocks[drop], 0), candidate + 1

    def hit_tokens(self, candidate: int, drop: bool) -> int:
        """Return the hit in tokens of a candidate whose window is complete.

        Near the start of a prompt the window is cut off at the first token. There
        vLLM aligns what it found before it drops the proof block, and once more
        after it; both are repeated here.
        """
        length = candidate + 1
        if length < self.num_blocks[drop]:
            length -= length % self.step
        if drop and length > 0:
            length -= 1
            length -= length % self.step
        return max(length, 0) * self.block_tokens

    def position(self, candidate: int, drop: bool) -> int:
        """Return the position in tokens that a candidate is the tail of."""
        return (candidate + 1 - drop) * self.block_tokens

    def blocks_at(self, position: int) -> tuple[int, int]:
        """Return ``(first, end)`` of the tail at a position, the proof block included.

        At 512 tokens in the example above: ``(6, 9)``.
        """
        end = position // self.block_tokens
        return max(end - self.num_blocks[False], 0), end + self.drops

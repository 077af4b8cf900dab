# SPDX-License-Identifier: Apache-2.0
"""Prompts of a trace as numbered hash units."""

from dataclasses import dataclass

import numpy as np

from vllm.junctions.plan.trace import TraceRequest

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Prompt:
    """A request's prompt.

    Attributes:
        num_tokens: Its length.
        units: Numbers of its hash units, one every ``hash_tokens`` tokens; the same
            number means the same prefix up to there.
        conversation: The same for prompts that begin with the same block.
    """

    num_tokens: int
    units: np.ndarray
    conversation: int


@dataclass(frozen=True)
class Prompts:
    """All prompts of a trace.

    Attributes:
        prompts: In order of arrival.
        num_blocks: Distinct blocks of 512 tokens; units are below this times the
            units of a block.
    """

    prompts: list[Prompt]
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)


def number_prompts(
    requests: list[TraceRequest], hash_tokens: int, assume_continued: bool = False
) -> Prompts:
    """Number the hash units of all prompts.

    A block is the same as another where it follows the same blocks and has the same
    id and length, so ids need not be chained.

    Args:
        requests: The trace.
        hash_tokens: Tokens per hash unit; a divisor of 512.
        assume_continued: A trace does not say how far two different blocks agree.
            True: a prompt that goes on where the last whole block of an earlier one
            ends, and further, is taken to begin with all that the earlier one had
            in its last block (as the next turn of a conversation does). False: two
            different blocks have nothing in common.
    """
    numbers = _UnitNumbers(TRACE_BLOCK_TOKENS // hash_tokens, assume_continued)
    prompts = []
    for request in requests:
        blocks = numbers.blocks(request)
        units = np.concatenate([numbers.units_by_block[block] for block in blocks])
        prompts.append(
            Prompt(
                request.input_length,
                units[: request.input_length // hash_tokens],
                blocks[0],
            )
        )
    return Prompts(prompts, len(numbers.units_by_block))


class _UnitNumbers:
    """Blocks of a trace, and the numbers of their units."""

    def __init__(self, units_per_block: int, assume_continued: bool) -> None:
        self.units_by_block: list[np.ndarray] = []
        self._units_per_block = units_per_block
        self._assume_continued = assume_continued
        self._numbers: dict[tuple[int, int, int], int] = {}
        # By the block that it follows: the latest block that was not whole.
        self._last_parts: dict[int, tuple[int, int]] = {}

    def blocks(self, request: TraceRequest) -> list[int]:
        """Return the numbers of a request's blocks."""
        blocks = []
        parent = -1
        for index, hash_id in enumerate(request.hash_ids):
            rest = request.input_length - index * TRACE_BLOCK_TOKENS
            num_tokens = min(rest, TRACE_BLOCK_TOKENS)
            key = (parent, hash_id, num_tokens)
            if key not in self._numbers:
                self._numbers[key] = self._add(parent, num_tokens)
            if num_tokens < TRACE_BLOCK_TOKENS:
                self._last_parts[parent] = (self._numbers[key], num_tokens)
            parent = self._numbers[key]
            blocks.append(parent)
        return blocks

    def _add(self, parent: int, num_tokens: int) -> int:
        number = len(self.units_by_block)
        first = number * self._units_per_block
        units = np.arange(first, first + self._units_per_block)
        earlier, num_shared_tokens = self._last_parts.get(parent, (-1, 0))
        continues = parent >= 0 and 0 < num_shared_tokens <= num_tokens
        if self._assume_continued and continues:
            num_shared = num_shared_tokens * self._units_per_block // TRACE_BLOCK_TOKENS
            units[:num_shared] = self.units_by_block[earlier][:num_shared]
        self.units_by_block.append(units)
        return number

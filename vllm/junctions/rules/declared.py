# SPDX-License-Identifier: Apache-2.0
"""Declared junctions: where a client says that later prompts will share with this one.

What a client sends is input like any other: whatever is wrong with it costs the client
a tail, and nothing else. Nothing in this module knows about vLLM's objects.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

MAX_DECLARED = 4
# In a request's ``kv_transfer_params``.
DECLARED_KEY = "junctions"


class Flaw(Enum):
    """Why a declared position is ignored, in words an operator can act on."""

    NOT_A_LIST = "not_a_list"
    TOO_MANY = "too_many"
    NOT_AN_INTEGER = "not_an_integer"
    OUT_OF_RANGE = "out_of_range"
    NOT_ASCENDING = "not_ascending"
    TOO_SHORT = "too_short"

    @property
    def meaning(self) -> str:
        """What was wrong, to go on with after "ignored:"."""
        return _MEANINGS[self]


_MEANINGS = {
    Flaw.NOT_A_LIST: "the value is not a list of token positions",
    Flaw.TOO_MANY: f"only the first {MAX_DECLARED} entries count",
    Flaw.NOT_AN_INTEGER: "an entry is not an integer",
    Flaw.OUT_OF_RANGE: "an entry is not within the prompt",
    Flaw.NOT_ASCENDING: "an entry is not above the one before it",
    Flaw.TOO_SHORT: "no position that can be hit lies at or below an entry",
}


@dataclass(frozen=True)
class Declared:
    """What a client's positions come to.

    Attributes:
        positions: Ascending, distinct multiples of the scheduler block.
        flaws: One for each entry that is ignored, or one for the whole value.
    """

    positions: tuple[int, ...] = ()
    flaws: tuple[Flaw, ...] = ()


def declared_boundaries(
    asked: Any, num_prompt_tokens: int, scheduler_block_size: int, proof_tokens: int
) -> Declared:
    """Return where tails make those hit who share a prompt up to declared positions.

    That is the highest multiple of the scheduler block at or below each; with EAGLE
    it must leave room for the block that proves it, and for the whole scheduler block
    with which that is stored. Worked numbers, scheduler block 256, prompt of 5,000
    tokens: 3,848 gives 3,840; with proof blocks of 64 tokens 3,848 gives 3,584 and
    4,000 gives 3,840.

    Args:
        asked: What the client sent: a list of at most four token positions, strictly
            ascending integers within the prompt. Whatever else there is, is ignored.
        num_prompt_tokens: Tokens of the prompt.
        scheduler_block_size: Tokens per scheduler block, the unit of joint hits.
        proof_tokens: Tokens past a position that a sibling has to share to prove it:
            the largest block of a group that drops its last one for a drafter.
    """
    if not isinstance(asked, list):
        return Declared(flaws=(Flaw.NOT_A_LIST,))
    # However long the list is, it takes no longer.
    flaws = [Flaw.TOO_MANY] * (len(asked) > MAX_DECLARED)
    highest = num_prompt_tokens // scheduler_block_size - (proof_tokens > 0)
    positions: list[int] = []
    last = 0
    for entry in asked[:MAX_DECLARED]:
        if flaw := _flaw(entry, last, num_prompt_tokens):
            flaws.append(flaw)
            continue
        last = entry
        block = min((entry - proof_tokens) // scheduler_block_size, highest)
        if block <= 0:
            flaws.append(Flaw.TOO_SHORT)
        else:
            positions.append(block * scheduler_block_size)
    return Declared(tuple(sorted(set(positions))), tuple(flaws))


def _flaw(entry: Any, last: int, num_prompt_tokens: int) -> Flaw | None:
    if type(entry) is not int:
        return Flaw.NOT_AN_INTEGER
    if not 0 < entry <= num_prompt_tokens:
        return Flaw.OUT_OF_RANGE
    return Flaw.NOT_ASCENDING if entry <= last else None

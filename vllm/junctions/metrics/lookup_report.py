# SPDX-License-Identifier: Apache-2.0
"""What one store lookup found and what it cost, for metrics and logs."""

from dataclasses import dataclass
from enum import Enum


class LookupOutcome(Enum):
    """How a store lookup ended, in words an operator can act on."""

    HIT = "hit"
    NOTHING_STORED = "nothing_stored"
    TAIL_MISSING = "tail_missing"
    TOO_SHORT = "too_short"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class LookupReport:
    """One lookup. Lengths are in tokens.

    Attributes:
        num_tokens: Tokens of the request that asked.
        hit_length: The joint hit.
        longest_hit_length: The longest hit of any single group.
        junctions: Positions that the lookup reported.
        lagging_group: A group that keeps the joint hit below the longest, if known.
        num_keys: Keys whose existence the store was asked for.
        num_rpcs: Calls to the store.
        is_too_short: The request has no whole block that could be stored.
        error: What went wrong, if anything did.
    """

    num_tokens: int
    hit_length: int = 0
    longest_hit_length: int = 0
    junctions: tuple[int, ...] = ()
    lagging_group: int | None = None
    num_keys: int = 0
    num_rpcs: int = 0
    is_too_short: bool = False
    error: str | None = None

    @property
    def outcome(self) -> LookupOutcome:
        """The outcome that these figures amount to."""
        if self.error is not None:
            return LookupOutcome.ERROR
        if self.hit_length:
            return LookupOutcome.HIT
        if self.is_too_short:
            return LookupOutcome.TOO_SHORT
        if self.longest_hit_length:
            return LookupOutcome.TAIL_MISSING
        return LookupOutcome.NOTHING_STORED

    @property
    def lost_tokens(self) -> int:
        """Tokens that some group has and the joint hit does not reach."""
        return max(self.longest_hit_length - self.hit_length, 0)

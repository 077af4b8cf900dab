# SPDX-License-Identifier: Apache-2.0
"""What a store lookup found, whichever way it asked."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    TailKeyBoundary,
)


@dataclass(frozen=True)
class Found:
    """What a lookup found. Lengths in tokens.

    Attributes:
        hit_length: The joint hit.
        longest_hit_length: As :meth:`LookupCoordinator.full_attention_hit`.
        tail_key_boundaries: Stock's entries for the hit, one a group.
        lagging_group: A group that keeps the joint hit below the longest, if it is
            known.
        answers: Whether each key exists; None if not every key was asked for.
    """

    hit_length: int
    longest_hit_length: int
    tail_key_boundaries: tuple[TailKeyBoundary, ...] = ()
    lagging_group: int | None = None
    answers: ExternalCachedBlockPool | None = None

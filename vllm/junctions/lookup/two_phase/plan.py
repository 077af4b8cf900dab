# SPDX-License-Identifier: Apache-2.0
"""What a two-phase lookup needs to know of a layout, and of which layouts it can be.

See :mod:`.two_phase` for the lookup itself.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    StoreSpecGroup,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import PoolKey
from vllm.logger import init_logger
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm.junctions.lookup.coordinator import LookupCoordinator
from vllm.junctions.lookup.shapes import tail_shape
from vllm.junctions.lookup.two_phase.managers import searched_by_pool
from vllm.junctions.rules.tails import TailShape

logger = init_logger(__name__)


@dataclass(frozen=True)
class Batches:
    """How much each call to the store asks for.

    Attributes:
        full_blocks: Scheduler blocks of full attention that the first call reaches.
        full_growth: How many times further each later one does.
        evidence: Positions that the first call asks for evidence of.
        evidence_growth: How many times more each later one does.
        tail_growth: The same for whole tails where there is evidence; the first
            call asks for one.
    """

    full_blocks: int = 512
    full_growth: int = 8
    evidence: int = 64
    evidence_growth: int = 8
    tail_growth: int = 8


class FullGroup(NamedTuple):
    """Full-attention groups of one spec."""

    group_ids: list[int]
    units_per_block: int


class Tail(NamedTuple):
    """Sparse groups of one spec, and the tail that each of them needs."""

    group_ids: list[int]
    units_per_block: int
    shape: TailShape


class LookupPlan:
    """What two-phase lookups need to know of a layout, worked out once.

    Args:
        coord: The coordinator that one-phase lookups use.
        key_prefixes: For each group the prefixes of its keys, one a rank namespace.
        batches: How much to ask for at once.

    Raises:
        ValueError: The layout has a group whose search this module does not know;
            see :func:`unknown_group`.
    """

    def __init__(
        self,
        coord: LookupCoordinator,
        key_prefixes: Sequence[tuple[str, ...]],
        batches: Batches = Batches(),
    ) -> None:
        if reason := unknown_group(coord):
            raise ValueError(reason)
        self.coord = coord
        # A key is a stem and a hash.
        self.key_stems = [
            tuple(PoolKey.build_key_string(prefix, "") for prefix in prefixes)
            for prefixes in key_prefixes
        ]
        self.batches = batches
        self.hash_tokens = coord.hash_block_size
        self.full_groups = [
            FullGroup(group.group_ids, group.spec.block_size // self.hash_tokens)
            for group in coord.attention_groups
            if _is_full(group)
        ]
        self.tails = [
            _tail(group, coord)
            for group in coord.attention_groups
            if not _is_full(group)
        ]
        self.skips_positions = _may_skip_positions(coord, self.tails)
        # The coordinator as it is, but for who searches in sparse groups.
        self.search = copy.copy(coord)
        self.search.attention_groups = [
            group
            if _is_full(group)
            else group._replace(manager_cls=searched_by_pool(group.manager_cls))
            for group in coord.attention_groups
        ]

    def max_rpcs(self, num_tokens: int) -> int:
        """Return how many calls to the store a lookup makes at most.

        For 131,072 tokens on DeepSeek-V4-Flash's layout (512 positions): 1 for the
        first batch, 7 for tails. Most lookups make 1 to 3.
        """
        num_units = self.coord.align_lookup_length(num_tokens) // self.hash_tokens
        rpcs = 1 + self.last_round(num_units)
        reach = self.first_full_units
        while self.full_groups and reach < num_units:
            reach *= self.batches.full_growth
            rpcs += 1
        if self.coord.enable_partial_hash_hits:
            # Inside the block where full attention ends, in each of up to three
            # searches, and the keys of the last blocks.
            rpcs += 3 * len(self.full_groups) + 1
        return rpcs

    @property
    def first_full_units(self) -> int:
        """Hash units of full attention that the first call reaches."""
        tokens = self.batches.full_blocks * self.coord.lcm_block_size
        return tokens // self.hash_tokens

    def last_round(self, num_units: int) -> int:
        """Return the number of the batch of tails that leaves nothing to ask."""
        num_positions = num_units * self.hash_tokens // self.coord.align_unit
        last = 4 if self.tails else 0
        while self.tails and num_positions > 1:
            num_positions //= self.batches.tail_growth
            last += 1
        return last


def _may_skip_positions(coord: LookupCoordinator, tails: list[Tail]) -> bool:
    """Whether the joint hit is the highest position at which every tail is complete.

    Then a search may pass over positions that another group cannot use. Not so with
    the EAGLE drop in several sparse groups, or where a window cut off at the first
    token is involved: there vLLM's result depends on where each search ended. Nor
    where a position of one group can lie inside a block of another.
    """
    eagle = [tail for tail in tails if coord.eagle_group_ids & set(tail.group_ids)]
    shapes = [tail.shape for tail in tails]
    return (
        len(eagle) <= 1
        and all(
            tail.shape.step == 1 or tail.shape.num_blocks[False] <= tail.shape.step
            for tail in eagle
        )
        and all(
            one.step * one.block_tokens % other.block_tokens == 0
            for one in shapes
            for other in shapes
        )
    )


def unknown_group(coord: LookupCoordinator) -> str | None:
    """Say which group keeps a layout from two-phase lookups; None if there is none.

    Known are the searches of ``FullAttentionManager``, ``SlidingWindowManager`` and
    ``MambaManager``, also in subclasses that inherit them.
    """
    for group in coord.attention_groups:
        is_full = _is_full(group)
        known = (
            (FullAttentionManager,) if is_full else (SlidingWindowManager, MambaManager)
        )
        if not any(_searches_like(group.manager_cls, one) for one in known):
            return f"group {group.group_ids[0]} is of {group.manager_cls.__name__}"
        if not is_full and getattr(group.spec, "sliding_window", None) == 1:
            # Stock asks for no key of it.
            return f"group {group.group_ids[0]} has a window of one token"
    return None


def _is_full(group: StoreSpecGroup) -> bool:
    return isinstance(group.spec, FullAttentionSpec)


def _searches_like(manager_cls: type, known: type) -> bool:
    return issubclass(manager_cls, known) and all(
        getattr(getattr(manager_cls, name), "__func__", None)
        is getattr(getattr(known, name), "__func__", None)
        for name in ("find_longest_cache_hit", "_contiguous_blocks_for_hit")
        if hasattr(known, name)
    )


def _tail(group: StoreSpecGroup, coord: LookupCoordinator) -> Tail:
    shape = tail_shape(group, coord)
    return Tail(group.group_ids, shape.block_tokens // coord.hash_block_size, shape)


def plan_lookups(
    coord: LookupCoordinator, key_prefixes: Sequence[tuple[str, ...]]
) -> LookupPlan | None:
    """Return the plan of a layout; None, with a warning, if it needs one phase."""
    if reason := unknown_group(coord):
        logger.warning(
            "vllm-junctions: lookups ask for every key at once, as stock does: %s, "
            "for which two-phase lookups are not known to find the same.",
            reason,
        )
        return None
    return LookupPlan(coord, key_prefixes)

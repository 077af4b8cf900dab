# SPDX-License-Identifier: Apache-2.0
"""Random layouts, stores and requests for the law that lookups find what stock finds.

Only what a lookup reads is built: a coordinator, key prefixes and a set of keys.
"""

import hashlib
import random
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    MooncakeStoreWorker,
)
from vllm.v1.core.kv_cache_utils import BlockHash

from benchmarks.seed_table import LAYOUT as DEEPSEEK_V4
from testbed.box import Group, Layout
from testbed.box.layout import Kind
from testbed.lookup_worker import build_coordinator, build_worker
from vllm.junctions.lookup.two_phase.plan import Batches, LookupPlan
from vllm.junctions.store.coordinator import JunctionStoreCoordinator

_MAX_POSITIONS = 160
_MAX_UNITS = 2000
_HASHES = [
    BlockHash(hashlib.sha256(i.to_bytes(4, "big")).digest()) for i in range(1 << 14)
]
GEMMA = Layout((Group("full", 16), Group("swa", 16, 128)), hash_tokens=16)


class KeySet:
    """A store as lookups see it."""

    def __init__(self, keys: set[str]) -> None:
        self.keys = keys
        self.num_rpcs = 0
        self.num_keys = 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.num_rpcs += 1
        self.num_keys += len(keys)
        return [int(key in self.keys) for key in keys]


@dataclass(frozen=True)
class LookupLayout:
    """A layout and how it is spread over ranks.

    Attributes:
        layout: The groups.
        num_ranks: Rank namespaces by group.
        partial_hits: Whether hits land on hash units.
    """

    layout: Layout
    num_ranks: tuple[int, ...]
    partial_hits: bool = False

    @property
    def align_tokens(self) -> int:
        if self.partial_hits:
            return self.layout.hash_tokens
        return self.layout.scheduler_block_tokens

    def worker(self, cls: type[MooncakeStoreWorker], store: KeySet) -> Any:
        """Build a worker that looks up in one phase."""
        return build_worker(cls, self.layout, store, self.num_ranks, self.partial_hits)

    def plan(self, worker: Any, batches: Batches) -> LookupPlan:
        return LookupPlan(worker.coord, worker._lookup_key_prefixes, batches)


@dataclass(frozen=True)
class LookupCase:
    """One request and one store.

    Attributes:
        layout: The layout.
        num_tokens: Tokens of the request.
        saved: ``(group id, hash unit, rank)`` of what the store holds.
        batches: How much a two-phase lookup asks for at once.
    """

    layout: LookupLayout
    num_tokens: int
    saved: frozenset[tuple[int, int, int]]
    batches: Batches

    def __repr__(self) -> str:
        rows = [
            f"group {group}: units {sorted(u for g, u, r in self.saved if g == group)}"
            for group in range(len(self.layout.layout.groups))
        ]
        return f"{self.layout}\n{self.num_tokens} tokens, {self.batches}\n" + "\n".join(
            rows
        )

    @property
    def block_hashes(self) -> list[BlockHash]:
        return _HASHES[: self.num_tokens // self.layout.layout.hash_tokens]

    def store(self, prefixes: tuple[tuple[str, ...], ...]) -> KeySet:
        return KeySet(
            {
                f"{prefixes[group][rank]}@{_HASHES[unit].hex()}"
                for group, unit, rank in self.saved
            }
        )


def lookup_cases() -> st.SearchStrategy[LookupCase]:
    """Random cases, a seed each: drawn part by part they would take ten times as long.

    The second number bounds the size, so that failing cases shrink.
    """
    return st.builds(random_case, st.integers(0, 1 << 48), st.integers(1, 100))


def random_case(seed: int, percent: int = 100) -> LookupCase:
    """Return the case of a seed, at a share of the full size."""
    rng = random.Random(seed)
    layout = _random_lookup_layout(rng)
    longest = min(
        _MAX_UNITS * layout.layout.hash_tokens // layout.align_tokens, _MAX_POSITIONS
    )
    longest = max(longest * percent // 100, 2)
    num_positions = rng.randint(0, rng.choice([min(longest, 9), longest, longest]))
    off = rng.choice([0, rng.randrange(layout.align_tokens)])
    num_tokens = num_positions * layout.align_tokens + off
    contents = Contents(layout, num_tokens, rng)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        contents.save(rng.choice([1.0, rng.random()]), rng.randint(0, 3))
    contents.add(rng.choice([0, 0, 0, 0, 0, 0.02, 0.3, 0.9, 1]))
    contents.lose(rng.choice([0, 0, 0, 0.01, 0.1, 0.5]))
    batches = Batches()
    if rng.random() < 0.5:
        # Few positions see many calls then.
        batches = Batches(
            *(rng.randint(low, 3) for low in (1, 2, 1, 2, 2)),
        )
    return LookupCase(layout, num_tokens, frozenset(contents.saved), batches)


def _random_lookup_layout(rng: random.Random) -> LookupLayout:
    layout = rng.choice([DEEPSEEK_V4, GEMMA, *[None] * 8]) or _random_layout(rng)
    num_ranks = tuple(rng.choice([1, 1, 1, 2, 3]) for _ in layout.groups)
    may_be_partial = _may_be_partial(layout)
    return LookupLayout(layout, num_ranks, may_be_partial and rng.random() < 0.7)


def _may_be_partial(layout: Layout) -> bool:
    """Whether hits of this layout could land on hash units.

    Core lets them only where windows are as fine as that; the store's coordinator
    takes what it is told.
    """
    return layout.scheduler_block_tokens > layout.hash_tokens


def _random_layout(rng: random.Random) -> Layout:
    hash_tokens = rng.choice([1, 2, 4])
    kinds: list[Kind] = [rng.choice(["full", "mla"])] if rng.random() < 0.8 else []
    for _ in range(rng.randint(0 if kinds else 1, 4)):
        kinds.append(rng.choice(["full", "mla", "swa", "swa", "swa_mla", "mamba"]))
    rng.shuffle(kinds)
    groups = [_random_group(rng, kind, hash_tokens) for kind in kinds]
    if rng.random() < 0.3:
        # Another group of a spec that is there already.
        groups.append(rng.choice(groups))
    flagged = rng.choice([None, "none", "some"])
    if flagged == "some":
        groups = [
            replace(group, eagle=group.kind != "mamba" and rng.random() < 0.5)
            for group in groups
        ]
    return Layout(
        tuple(groups),
        hash_tokens,
        drops_eagle_block=flagged is not None,
        retention_interval=rng.choice([0, 0, None]),
    )


def _random_group(rng: random.Random, kind: Kind, hash_tokens: int) -> Group:
    block_tokens = rng.choice([1, 1, 2, 3, 4]) * hash_tokens
    window_tokens = 0
    if kind.startswith("swa"):
        window_tokens = rng.randint(2, 4 * block_tokens + 1)
    return Group(kind, block_tokens, window_tokens)


class Contents:
    """Fills a store: as requests save, and then with what nobody would expect."""

    def __init__(
        self, layout: LookupLayout, num_tokens: int, rng: random.Random
    ) -> None:
        self._layout = layout
        self._rng = rng
        self._num_units = num_tokens // layout.layout.hash_tokens
        self._coord = build_coordinator(
            JunctionStoreCoordinator, layout.layout, layout.partial_hits
        )
        self.saved: set[tuple[int, int, int]] = set()

    def save(self, share: float, num_junctions: int) -> None:
        """Save a prompt that shares a part of the request, with some junctions."""
        layout = self._layout.layout
        block = layout.scheduler_block_tokens
        num_tokens = int(self._num_units * layout.hash_tokens * share)
        aligned = num_tokens // block * block
        if not aligned:
            return
        junctions = [self._rng.randrange(aligned + 1) for _ in range(num_junctions)]
        masks = self._coord.store_mask(aligned, 0, num_tokens, junctions)
        for group_id, (group, mask) in enumerate(
            zip(layout.groups, masks, strict=True)
        ):
            units = group.block_tokens // layout.hash_tokens
            for index in range(aligned // group.block_tokens):
                if mask is None or mask[index]:
                    self._put(group_id, (index + 1) * units - 1)
            if group.kind == "mamba":
                step = layout.hash_tokens if self._layout.partial_hits else block
                for end in (num_tokens, *junctions):
                    self._put(group_id, end // step * step // layout.hash_tokens - 1)
            elif self._layout.partial_hits:
                self._put(group_id, num_tokens // layout.hash_tokens - 1)

    def add(self, density: float) -> None:
        """Put a share of all keys there could be."""
        if not density:
            return
        for key in self._all_keys():
            if self._rng.random() < density:
                self.saved.add(key)

    def lose(self, density: float) -> None:
        """Lose a share of what is there."""
        if density:
            self.saved = {
                key for key in sorted(self.saved) if self._rng.random() >= density
            }

    def _all_keys(self) -> list[tuple[int, int, int]]:
        layout = self._layout.layout
        return [
            (group_id, unit, rank)
            for group_id, group in enumerate(layout.groups)
            for units in [
                1
                if self._layout.partial_hits
                else group.block_tokens // layout.hash_tokens
            ]
            for unit in range(units - 1, self._num_units, units)
            for rank in range(self._layout.num_ranks[group_id])
        ]

    def _put(self, group_id: int, unit: int) -> None:
        if 0 <= unit < self._num_units:
            self.saved |= {
                (group_id, unit, rank)
                for rank in range(self._layout.num_ranks[group_id])
            }

# SPDX-License-Identifier: Apache-2.0
"""One policy on one trace: who hits what, and what the store gets.

Searches and masks are those of vLLM's store coordinator and of this package's; only
caches and the router are models.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    MooncakeStoreCoordinator,
)

from benchmarks.replay.cache import BlockCache
from benchmarks.replay.keys import Answers, KeySpace, PromptBlocks
from benchmarks.replay.layouts import ModelLayout
from benchmarks.replay.policies import Policy
from benchmarks.replay.trace import Prompt, Prompts
from vllm.junctions.rules.best_tails import dense_span_tokens
from vllm.junctions.rules.boundaries import merge_boundaries
from vllm.junctions.rules.placement import FinishedLookup, TailPlacement
from vllm.junctions.store.coordinator import JunctionStoreCoordinator

Router = Literal["round-robin", "sticky"]


@dataclass(frozen=True)
class Cluster:
    """What a trace is replayed on.

    Attributes:
        num_instances: vLLM instances that share the store.
        router: Who gets a prompt: the next instance, or always the same one for
            prompts that begin with the same block.
        local_blocks: Blocks of each instance's own prefix cache; 0 for none.
        store_blocks: Blocks that the store holds; None is no bound.
    """

    num_instances: int = 1
    router: Router = "round-robin"
    local_blocks: int = 0
    store_blocks: int | None = None


@dataclass
class Outcome:
    """What became of a trace under one policy. Keys and blocks are of one rank.

    Attributes:
        hit_tokens: By request, what it did not have to compute.
        store_hit_tokens: By request, how much of that it loaded from the store.
        num_junction_requests: Requests that found a junction in the store.
        num_lookup_keys: Keys that lookups named: of each request and group, the
            blocks that the coordinator's ``lookup_mask`` names.
        num_puts: Blocks stored.
        num_tail_puts: Those of groups other than full attention.
        num_predicted_tails: Predicted tails placed.
        num_predicted_served: Requests that hit one, and nothing as long without.
        placement_seconds: By request, what prediction took.
        num_stored: Blocks in the store at the end.
        num_evicted: Blocks that it had to let go.
    """

    hit_tokens: list[int] = field(default_factory=list)
    store_hit_tokens: list[int] = field(default_factory=list)
    num_junction_requests: int = 0
    num_lookup_keys: int = 0
    num_puts: int = 0
    num_tail_puts: int = 0
    num_predicted_tails: int = 0
    num_predicted_served: int = 0
    placement_seconds: list[float] = field(default_factory=list)
    num_stored: int = 0
    num_evicted: int = 0


@dataclass(frozen=True)
class Found:
    """What a search found, in tokens.

    Attributes:
        hit_length: What all groups can reuse.
        longest_hit_length: What some group can; not looked for in a stock store.
    """

    hit_length: int = 0
    longest_hit_length: int = 0

    @property
    def has_junction(self) -> bool:
        return self.longest_hit_length > self.hit_length


class Replay:
    """A cluster under one policy."""

    def __init__(
        self, policy: Policy, layout: ModelLayout, prompts: Prompts, cluster: Cluster
    ) -> None:
        self._policy = policy
        self._prompts = prompts
        self._cluster = cluster
        self._full_ids = layout.full_attention_group_ids
        groups = layout.groups
        if policy.full_attention_only:
            groups = [groups[index] for index in self._full_ids]
            self._full_ids = tuple(range(len(groups)))
        self._space = KeySpace(groups, layout.hash_tokens, prompts.num_blocks)
        settings: dict[str, Any] = {
            "kv_cache_groups": groups,
            "scheduler_block_size": layout.scheduler_block_tokens,
            "hash_block_size": layout.hash_tokens,
            "use_eagle": any(group.is_eagle_group for group in groups),
            "retention_interval": policy.retention_interval,
        }
        self._local = JunctionStoreCoordinator(**settings)
        self._store = (
            self._local if policy.junctions else MooncakeStoreCoordinator(**settings)
        )
        self._stored = BlockCache(self._space.num_keys, cluster.store_blocks)
        self._caches = [
            BlockCache(self._space.num_keys, cluster.local_blocks)
            for _ in range(cluster.num_instances if cluster.local_blocks else 0)
        ]
        # Each instance learns from the lookups that it makes.
        self._placements = [
            TailPlacement(
                policy.predicted_tails,
                layout.scheduler_block_tokens,
                settings["use_eagle"],
                dense_span_tokens(layout.tails, layout.scheduler_block_tokens),
            )
            for _ in range(cluster.num_instances)
        ]
        self._lookup_mask = lru_cache(maxsize=None)(self._read_lookup_mask)
        self._first_loaded: dict[int, list[int]] = {}
        self.outcome = Outcome()

    def run(self, on_request: Callable[[], None] = lambda: None) -> Outcome:
        """Replay all prompts, one after the other; call back after each."""
        for index, prompt in enumerate(self._prompts.prompts):
            self._serve(prompt, self._route(index, prompt))
            on_request()
        self.outcome.num_stored = self._stored.num_blocks
        self.outcome.num_evicted = self._stored.num_evicted
        return self.outcome

    def _route(self, index: int, prompt: Prompt) -> int:
        turn = index if self._cluster.router == "round-robin" else prompt.conversation
        return turn % self._cluster.num_instances

    def _serve(self, prompt: Prompt, instance: int) -> None:
        local_cache = self._caches[instance] if self._caches else None
        blocks = PromptBlocks(prompt, self._space)
        local = Found() if local_cache is None else self._match(blocks, local_cache)
        stored = self._look_up(blocks)
        hit_length = max(local.hit_length, stored.hit_length)
        self.outcome.hit_tokens.append(hit_length)
        self.outcome.store_hit_tokens.append(hit_length - local.hit_length)
        self.outcome.num_junction_requests += stored.has_junction
        junctions = self._junctions(local, stored)
        if self._policy.predicted_tails:
            placement = self._placements[instance]
            predicted = self._predict(placement, blocks, hit_length, junctions)
            junctions = merge_boundaries(junctions, predicted)
        self._save(blocks, hit_length, junctions)
        if local_cache is not None:
            self._keep(blocks, local_cache, local.hit_length, hit_length, junctions)

    def _match(self, blocks: PromptBlocks, local_cache: BlockCache) -> Found:
        """Search an instance's own cache."""
        answers = blocks.answers(
            [np.flatnonzero(local_cache.cached(keys)) for keys in blocks.keys]
        )
        usable = self._local.align_lookup_length(blocks.num_tokens - 1)
        hit_length = self._hit(self._local, blocks, usable, answers)
        return self._with_longest(blocks, hit_length, answers)

    def _look_up(self, blocks: PromptBlocks) -> Found:
        """Search the store, as the worker does."""
        asked = self._store.align_lookup_length(blocks.num_tokens)
        if asked <= 0:
            return Found()
        found = []
        for keys, named in zip(blocks.keys, self._named_blocks(asked), strict=True):
            self.outcome.num_lookup_keys += len(named)
            found.append(named[self._stored.cached(keys[named])])
        self._stored.use(blocks.in_order(found))
        answers = blocks.answers(found)
        hit_length = self._hit(self._store, blocks, asked, answers)
        if hit_length >= blocks.num_tokens:
            usable = self._store.align_lookup_length(blocks.num_tokens - 1)
            hit_length = self._hit(self._store, blocks, usable, answers)
        if not self._policy.junctions:
            return Found(hit_length)
        return self._with_longest(blocks, hit_length, answers)

    def _named_blocks(self, asked: int) -> list[np.ndarray]:
        """Return the blocks of each group that a lookup of ``asked`` tokens names."""
        return [
            np.arange(asked // block_tokens) if named is None else named
            for named, block_tokens in zip(
                self._lookup_mask(asked), self._space.block_tokens, strict=True
            )
        ]

    def _read_lookup_mask(self, asked: int) -> list[np.ndarray | None]:
        return [
            None if mask is None else np.flatnonzero(_as_array(mask))
            for mask in self._store.lookup_mask(asked)
        ]

    def _hit(
        self,
        coordinator: MooncakeStoreCoordinator,
        blocks: PromptBlocks,
        max_tokens: int,
        answers: Answers,
    ) -> int:
        usable = self._within_reach(max_tokens, answers)
        _, hit_length = coordinator.find_longest_cache_hit(
            blocks.hashes, usable, answers.pool
        )
        return hit_length

    def _with_longest(
        self, blocks: PromptBlocks, hit_length: int, answers: Answers
    ) -> Found:
        usable = self._within_reach(
            self._local.align_lookup_length(blocks.num_tokens - 1), answers
        )
        if hit_length >= usable:
            return Found(hit_length)
        longest = self._local.longest_group_hit(blocks.hashes, usable, answers.pool)
        return Found(hit_length, longest)

    def _junctions(self, local: Found, stored: Found) -> tuple[int, ...]:
        """Return where a request keeps tails besides those that retention asks for."""
        if self._policy.junctions:
            return merge_boundaries(
                *(
                    self._local.junctions(found.hit_length, found.longest_hit_length)
                    for found in (local, stored)
                )
            )
        # Stock finds one position, and that in its own cache only.
        return (local.longest_hit_length,) if local.has_junction else ()

    def _predict(
        self,
        placement: TailPlacement,
        blocks: PromptBlocks,
        hit_length: int,
        junctions: tuple[int, ...],
    ) -> tuple[int, ...]:
        lookup = FinishedLookup(
            blocks.num_tokens, hit_length, junctions, blocks.prefix_key
        )
        start = time.perf_counter()
        saved_tokens = placement.observe(lookup)
        predicted = placement.place(lookup)
        self.outcome.placement_seconds.append(time.perf_counter() - start)
        self.outcome.num_predicted_served += saved_tokens > 0
        self.outcome.num_predicted_tails += len(predicted)
        return predicted

    def _within_reach(self, max_tokens: int, answers: Answers) -> int:
        """Leave out what no group can hit, rather than search it block by block."""
        block_tokens = self._local.lcm_block_size
        reach = -(-answers.reach_tokens // block_tokens) * block_tokens
        return min(max_tokens, reach)

    def _save(
        self, blocks: PromptBlocks, hit_length: int, junctions: Sequence[int]
    ) -> None:
        """Store what the store lacks of a prompt that resumed at ``hit_length``."""
        # Only ours takes junctions.
        extra = (junctions,) if self._policy.junctions else ()
        kept = [
            np.flatnonzero(mask)
            for mask in self._kept(self._store, blocks, hit_length, *extra)
        ]
        for group_id, (keys, indices) in enumerate(zip(blocks.keys, kept, strict=True)):
            if group_id not in self._full_ids:
                num_stored = np.count_nonzero(self._stored.cached(keys[indices]))
                self.outcome.num_tail_puts += len(indices) - int(num_stored)
        self.outcome.num_puts += self._stored.use(blocks.in_order(kept))

    def _keep(
        self,
        blocks: PromptBlocks,
        local_cache: BlockCache,
        local_hit_length: int,
        hit_length: int,
        junctions: Sequence[int],
    ) -> None:
        """Leave in an instance's own cache what vLLM leaves there."""
        kept = self._kept(self._local, blocks, hit_length, junctions)
        first_loaded = self._first_loaded_blocks(blocks, hit_length)
        for group_id, mask in enumerate(kept):
            num_hit = local_hit_length // self._space.block_tokens[group_id]
            mask[first_loaded[group_id] : num_hit] = True
        local_cache.use(blocks.in_order([np.flatnonzero(mask) for mask in kept]))

    def _kept(
        self,
        coordinator: MooncakeStoreCoordinator,
        blocks: PromptBlocks,
        hit_length: int,
        *junctions: Sequence[int],
    ) -> list[np.ndarray]:
        """Return masks of the blocks that retention keeps and the instance has.

        An instance has the blocks that it computed, and those that a hit needs.
        """
        block_tokens = coordinator.lcm_block_size
        num_tokens = blocks.num_tokens // block_tokens * block_tokens
        masks = coordinator.store_mask(num_tokens, 0, blocks.num_tokens, *junctions)
        kept = [
            np.ones(num_tokens // size, dtype=bool) if mask is None else _as_array(mask)
            for mask, size in zip(masks, self._space.block_tokens, strict=True)
        ]
        first_loaded = self._first_loaded_blocks(blocks, hit_length)
        for mask, first in zip(kept, first_loaded, strict=True):
            mask[:first] = False
        return kept

    def _first_loaded_blocks(self, blocks: PromptBlocks, hit_length: int) -> list[int]:
        """Return the first block of each group that a hit loads."""
        if hit_length not in self._first_loaded:
            masks = self._store.load_mask(blocks.hashes, hit_length)
            self._first_loaded[hit_length] = [
                mask.index(True) if True in mask else len(mask) for mask in masks
            ]
        return self._first_loaded[hit_length]


def _as_array(mask: list[bool]) -> np.ndarray:
    return np.frombuffer(bytearray(mask), dtype=bool)

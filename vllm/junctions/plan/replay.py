# SPDX-License-Identifier: Apache-2.0
"""All policies on one stream of prompts: who hits what, and what the store gets.

A prompt is looked up, learns its junctions, and leaves blocks and tails, as vLLM's
store coordinator and this package's do it; tests compare with them. Caches, and who
gets a prompt, are models.
"""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.junctions.plan.bounded import BoundedCache
from vllm.junctions.plan.cluster import Cluster, Outcome, Served
from vllm.junctions.plan.contents import Kept, OpenStore
from vllm.junctions.plan.policies import Policy
from vllm.junctions.plan.prompts import Prompt
from vllm.junctions.plan.shape import Shape
from vllm.junctions.plan.tree import Edge, PrefixTree
from vllm.junctions.record.format import Layout
from vllm.junctions.rules.best_tails import dense_span_tokens
from vllm.junctions.rules.boundaries import junction_boundaries, merge_boundaries
from vllm.junctions.rules.placement import FinishedLookup, TailPlacement


@dataclass(order=True)
class _Put:
    """What a prompt leaves, until others can see it."""

    stored_ms: float
    number: int
    prompt: Prompt = field(compare=False)
    instance: int = field(compare=False)
    replays: tuple[int, ...] = field(compare=False)
    to_store: list[Kept] = field(compare=False)
    to_local: list[Kept] = field(compare=False)


class Replay:
    """A cluster under several policies at once.

    Attributes:
        policies: The policies; the first is what zero hits are counted by.
        outcomes: By policy.
        num_requests: Prompts so far.
        prompt_tokens: Their tokens.
        num_lookup_keys: Keys that lookups name where they ask for all at once.
        num_forgotten_tokens: Tokens forgotten to stay in memory.
    """

    def __init__(
        self, policies: Sequence[Policy], layout: Layout, cluster: Cluster | None = None
    ) -> None:
        self.policies = list(policies)
        self.outcomes = [Outcome() for _ in policies]
        self.num_requests = self.prompt_tokens = self.num_lookup_keys = 0
        self.num_forgotten_tokens = 0
        self._cluster = cluster or Cluster()
        self._shape = Shape(layout)
        self._eagle = layout.drops_eagle_block
        self._tree = PrefixTree(layout.grain_tokens)
        self._open = OpenStore(self._shape, self.policies)
        self._stores = self._caches(self._cluster.store_blocks)
        num_local = self._cluster.num_instances if self._cluster.local_blocks else 0
        self._locals = [
            self._caches(self._cluster.local_blocks) for _ in range(num_local)
        ]
        self._placements = [
            self._learners() for _ in range(self._cluster.num_instances)
        ]
        self._waiting: list[_Put] = []

    def _caches(self, blocks: int | None) -> list[BoundedCache]:
        if blocks is None:
            return []
        is_all = self._cluster.store_blocks is not None
        return [
            BoundedCache(self._shape, policy, self._tree, blocks, is_all)
            for policy in self.policies
        ]

    def _learners(self) -> list[TailPlacement | None]:
        layout = self._shape.layout
        span = dense_span_tokens(layout.tails, layout.scheduler_block_tokens)
        return [
            TailPlacement(
                policy.predicted_tails, layout.scheduler_block_tokens, self._eagle, span
            )
            if policy.predicted_tails
            else None
            for policy in self.policies
        ]

    def serve(self, prompt: Prompt) -> Served:
        """Replay one prompt; those before it must have come."""
        while self._waiting and self._waiting[0].stored_ms <= prompt.looked_up_ms:
            self._store(heapq.heappop(self._waiting))
        instance = self._route(prompt)
        self.num_requests += 1
        self.prompt_tokens += prompt.num_tokens
        self.num_lookup_keys += self._shape.lookup_keys(prompt.num_tokens)
        path, num_shared = self._tree.match(prompt.ids)
        matched = num_shared * self._tree.unit_tokens
        for edge in path:
            edge.used = self.num_requests
        local, local_reach = self._look_up_locally(path, matched, prompt, instance)
        stored, store_reach = self._look_up(path, matched, prompt)
        replays = self._shape.replays(prompt.num_tokens)
        put = _Put(
            prompt.stored_ms, self.num_requests, prompt, instance, replays, [], []
        )
        served = Served([], [])
        for index in range(len(self.policies)):
            hit = max(local[index], stored[index])
            served.hit_tokens.append(hit)
            served.store_hit_tokens.append(hit - local[index])
            found = (
                (local[index], self._longest(index, prompt, local_reach[index])),
                (stored[index], self._longest(index, prompt, store_reach[index])),
            )
            self._keep(index, put, hit, found)
        self._count(served)
        if prompt.stored_ms > prompt.looked_up_ms:
            heapq.heappush(self._waiting, put)
        else:
            self._store(put, path, num_shared)
        return served

    def finish(self) -> list[Outcome]:
        """Store what still waits; return what became of all prompts, by policy."""
        while self._waiting:
            self._store(heapq.heappop(self._waiting))
        for index, outcome in enumerate(self.outcomes):
            outcome.num_stored = outcome.num_puts
            if self._stores:
                outcome.num_stored = self._stores[index].num_blocks
                outcome.num_evicted = self._stores[index].num_evicted
        return self.outcomes

    def _route(self, prompt: Prompt) -> int:
        if prompt.instance is not None:
            return prompt.instance % self._cluster.num_instances
        is_sticky = self._cluster.router == "sticky"
        turn = prompt.conversation if is_sticky else self.num_requests
        return turn % self._cluster.num_instances

    def _look_up_locally(
        self, path: list[Edge], matched: int, prompt: Prompt, instance: int
    ) -> tuple[list[int], list[int]]:
        none = [0] * len(self.policies)
        if not self._locals:
            return none, none
        hits, reaches = [], []
        for cache in self._locals[instance]:
            rows = cache.rows(path, matched)
            hits += cache.hits(rows, prompt.num_tokens)
            reaches.append(rows[-1].end if rows else 0)
        return hits, reaches

    def _look_up(
        self, path: list[Edge], matched: int, prompt: Prompt
    ) -> tuple[list[int], list[int]]:
        # Lookups name no block past the last scheduler block.
        matched = min(matched, self._shape.floor(prompt.num_tokens))
        if not self._stores:
            rows = self._open.rows(path, matched)
            return self._open.hits(rows, prompt.num_tokens), [matched] * len(
                self.policies
            )
        hits, reaches = [], []
        for store in self._stores:
            rows = store.rows(path, matched)
            hits += store.hits(rows, prompt.num_tokens)
            reaches.append(rows[-1].end if rows else 0)
            store.use(path, matched, self.num_requests)
        return hits, reaches

    def _longest(self, index: int, prompt: Prompt, reach: int) -> int:
        return self._shape.longest(prompt.num_tokens, reach) if reach else 0

    def _keep(
        self, index: int, put: _Put, hit: int, found: tuple[tuple[int, int], ...]
    ) -> None:
        """Decide where a request keeps tails, in the store and locally."""
        policy = self.policies[index]
        (local_hit, local_longest), (_, longest) = found
        if policy.junctions:
            eagle, block = self._eagle, self._shape.block
            junctions = junction_boundaries(*found[1], block, eagle)
            if local_longest:
                by_local = junction_boundaries(*found[0], block, eagle)
                junctions = merge_boundaries(by_local, junctions)
            self.outcomes[index].num_junction_requests += longest > found[1][0]
            if policy.predicted_tails:
                predicted = self._predict(index, put, hit, junctions)
                junctions = merge_boundaries(junctions, predicted)
            local = stored = junctions
        else:
            # Stock finds one position, and that in its own cache only.
            local = (local_longest,) if local_longest > local_hit else ()
            stored = ()
        put.to_store.append(Kept.of(hit, put.replays, stored))
        if self._locals:
            put.to_local.append(Kept.of(hit, put.replays, local))

    def _predict(
        self, index: int, put: _Put, hit: int, junctions: tuple[int, ...]
    ) -> tuple[int, ...]:
        ids, unit = put.prompt.ids, self._tree.unit_tokens
        lookup = FinishedLookup(
            put.prompt.num_tokens,
            hit,
            junctions,
            lambda num_tokens: int(ids[num_tokens // unit - 1]),
        )
        placement = self._placements[put.instance][index]
        assert placement is not None
        outcome = self.outcomes[index]
        start = time.perf_counter()
        saved_tokens = placement.observe(lookup)
        predicted = placement.place(lookup)
        outcome.placement_seconds += time.perf_counter() - start
        outcome.num_predicted_served += saved_tokens > 0
        outcome.num_predicted_tails += len(predicted)
        return predicted

    def _count(self, served: Served) -> None:
        best = served.hit_tokens[0]
        for outcome, hit, store_hit in zip(
            self.outcomes, served.hit_tokens, served.store_hit_tokens, strict=True
        ):
            outcome.hit_tokens += hit
            outcome.store_hit_tokens += store_hit
            outcome.num_hits += hit > 0
            outcome.num_zero_hits += best > 0 and not hit

    def _store(
        self, put: _Put, path: list[Edge] | None = None, num_shared: int = 0
    ) -> None:
        """Have a prompt's blocks and tails in the store and its instance's cache."""
        prompt, unit = put.prompt, self._tree.unit_tokens
        end = self._shape.floor(prompt.num_tokens)
        if not end:
            return
        if path is None:
            path, num_shared = self._tree.match(prompt.ids)
        path = self._tree.extend(prompt.ids, path, num_shared, end // unit)
        clock = self.num_requests
        for edge in path:
            edge.used = clock
        if self._stores:
            self._keep_all(self._stores, put.to_store, path, end, self.outcomes)
        else:
            reach = min(num_shared * unit, end)
            rows = self._open.rows(path, end)
            num_full = self._shape.full_blocks(reach, end)
            num_tails = self._open.put(rows, reach, end, put.to_store)
            for outcome, num_new in zip(self.outcomes, num_tails, strict=True):
                outcome.num_tail_puts += num_new
                outcome.num_puts += num_full + num_new
        if self._locals:
            self._keep_all(self._locals[put.instance], put.to_local, path, end, None)
        if not self._stores and self._tree.num_units > self._cluster.max_units:
            self._forget()

    def _keep_all(
        self,
        caches: list[BoundedCache],
        kept: list[Kept],
        path: list[Edge],
        end: int,
        outcomes: list[Outcome] | None,
    ) -> None:
        for index, (cache, one) in enumerate(zip(caches, kept, strict=True)):
            before = cache.num_blocks + cache.num_evicted
            num_tails = cache.keep(path, end, one, self.num_requests)
            if outcomes is not None:
                outcomes[index].num_tail_puts += num_tails
                num_new = cache.num_blocks + cache.num_evicted - before
                outcomes[index].num_puts += num_new

    def _forget(self) -> None:
        """Forget prefixes that nobody came by for longest, a tenth of all."""
        leaves = [(edge.used, edge.end, edge) for edge in self._tree.edges()]
        leaves.sort(key=lambda leaf: (leaf[0], -leaf[1]))
        before, enough = self._tree.num_units, 0.9 * self._cluster.max_units
        for _, _, edge in leaves:
            if self._tree.num_units < enough:
                break
            if not edge.children:
                self._tree.remove(edge)
        num_gone = before - self._tree.num_units
        self.num_forgotten_tokens += num_gone * self._tree.unit_tokens

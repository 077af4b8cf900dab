# SPDX-License-Identifier: Apache-2.0
"""Tails for first siblings: where a client declares that they part, or lookups taught.

A junction is found by the first sibling, which pays the whole prefill. What is placed
here is there before: positions in ``request.shared_prefix_boundaries`` that no lookup
has found yet.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from vllm.junctions.core.request import found_boundaries, set_junctions
from vllm.junctions.lookup.shapes import tail_shapes
from vllm.junctions.metrics.counted import (
    DECLARED,
    DECLARED_IGNORED,
    FIRST_SIBLING_TOKENS,
    FIRST_SIBLINGS,
    PREDICTED,
    JunctionCounters,
)
from vllm.junctions.rules.best_tails import dense_span_tokens
from vllm.junctions.rules.boundaries import at_chunk_end
from vllm.junctions.rules.declared import DECLARED_KEY, declared_boundaries
from vllm.junctions.rules.placement import MAX_TAILS, FinishedLookup, TailPlacement
from vllm.junctions.rules.siblings import UnusedTails
from vllm.junctions.store.coordinator import JunctionStoreCoordinator


@dataclass(frozen=True)
class ExtraTails:
    """Positions of a request's extra tails: ascending, above what it hit.

    Attributes:
        declared: Where its client said that siblings part.
        predicted: Where its first sibling is expected to part.
    """

    declared: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()


_NONE = ExtraTails()


class FirstSiblings:
    """Gives each request of one instance its extra tails, once.

    The memory of requests lasts until they end, so that one that is looked up again
    is not taken for a sibling of itself. Requests that differ in a salt or an adapter
    share no block hash, and so nothing here.
    """

    def __init__(
        self,
        coord: JunctionStoreCoordinator,
        max_predicted: int,
        saves: bool,
        max_chunk_tokens: int,
    ) -> None:
        """Start with nothing learned.

        Args:
            coord: The layout.
            max_predicted: Most predicted tails of a prompt, 0 to 4.
            saves: Whether the instance saves prompts; one that does not only learns.
            max_chunk_tokens: Most tokens of a prefill chunk.
        """
        self._hash_tokens = coord.hash_block_size
        self._block_tokens = block_tokens = coord.lcm_block_size
        self._saves = saves
        specs = [(group.spec, group.use_eagle) for group in coord.attention_groups]
        is_mamba = any(isinstance(spec, MambaSpec) for spec, _ in specs)
        self._chunk_tokens = 0
        if is_mamba:
            self._chunk_tokens = max_chunk_tokens // block_tokens * block_tokens
        self._proof_tokens = max(
            spec.block_size if drops and not isinstance(spec, MambaSpec) else 0
            for spec, drops in specs
        )
        self._placement = TailPlacement(
            max_predicted,
            block_tokens,
            bool(coord.eagle_group_ids),
            dense_span_tokens(tail_shapes(coord), block_tokens),
            self._chunk_tokens,
        )
        self._predicts = max_predicted > 0
        self._unused = UnusedTails()
        self._extra_by_request: dict[str, ExtraTails] = {}

    def of(self, req_id: str) -> ExtraTails:
        """Return the extra tails of a request."""
        return self._extra_by_request.get(req_id, _NONE)

    def discard(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended; what they taught stays."""
        for req_id in req_ids:
            self._extra_by_request.pop(req_id, None)

    def place(
        self,
        request: Request,
        hit_tokens: int,
        is_looked_up: bool,
        counters: JunctionCounters,
    ) -> None:
        """Set a request's declared and predicted junctions, the first time it is seen.

        Args:
            request: The request, with what its lookups found.
            hit_tokens: What it need not compute, in tokens.
            is_looked_up: Whether a store lookup of it finished well.
            counters: Count what is ignored, and who was served.
        """
        if request.request_id in self._extra_by_request:
            return
        params = request.kv_transfer_params
        declares = isinstance(params, Mapping) and DECLARED_KEY in params
        if not (declares or self._predicts or len(self._unused)):
            return
        declared = self._declared(request, hit_tokens, counters) if declares else ()
        seen = self._seen(request, hit_tokens, declared)
        self._extra_by_request[request.request_id] = _NONE
        if not self._is_hashed(request):
            return
        self._count_served(seen, is_looked_up, counters)
        for position in declared:
            others = self._placement.known_positions(seen)
            without_tokens = max(other for other in others if other < position)
            self._unused.add(seen.prefix_key(position), without_tokens)
        predicted: tuple[int, ...] = ()
        if self._predicts and self._saves and is_looked_up:
            predicted = self._placement.place(seen, MAX_TAILS - len(declared))
        set_junctions(request, declared=declared, predicted=predicted)
        # What a lookup found as well is kept because of that.
        alone = tuple(p for p in declared if p not in seen.junctions)
        self._extra_by_request[request.request_id] = ExtraTails(alone, predicted)

    def _seen(
        self, request: Request, hit_tokens: int, declared: tuple[int, ...]
    ) -> FinishedLookup:
        hash_tokens = self._hash_tokens
        return FinishedLookup(
            request.num_tokens,
            hit_tokens,
            tuple(p for p in found_boundaries(request) if p > hit_tokens),
            lambda num_tokens: request.block_hashes[num_tokens // hash_tokens - 1],
            declared,
        )

    def _is_hashed(self, request: Request) -> bool:
        """Whether the request has a hash for each whole block; embeddings may not."""
        num_tokens = request.num_tokens // self._block_tokens * self._block_tokens
        return len(request.block_hashes) * self._hash_tokens >= num_tokens

    def _declared(
        self, request: Request, hit_tokens: int, counters: JunctionCounters
    ) -> tuple[int, ...]:
        params: Any = request.kv_transfer_params
        declared = declared_boundaries(
            params[DECLARED_KEY],
            request.num_prompt_tokens,
            self._block_tokens,
            self._proof_tokens,
        )
        for flaw in declared.flaws:
            counters.add_once_told(
                DECLARED_IGNORED,
                flaw.value,
                f'Ignored in a request\'s kv_transfer_params["{DECLARED_KEY}"]: '
                f"{flaw.meaning}.",
            )
        start = hit_tokens // self._block_tokens * self._block_tokens
        ends = {
            at_chunk_end(position, start, self._chunk_tokens)
            for position in declared.positions
        }
        return tuple(sorted(end for end in ends if end > hit_tokens))

    def _count_served(
        self, seen: FinishedLookup, is_looked_up: bool, counters: JunctionCounters
    ) -> None:
        saved_tokens = dict.fromkeys((DECLARED, PREDICTED), 0)
        if seen.hit_tokens:
            without = self._unused.take(seen.prefix_key(seen.hit_tokens))
            if without is not None:
                saved_tokens[DECLARED] = seen.hit_tokens - without
        if is_looked_up:
            saved_tokens[PREDICTED] = self._placement.observe(seen)
        for source, num_tokens in saved_tokens.items():
            if num_tokens:
                counters.add(FIRST_SIBLINGS, 1, source)
                counters.add(FIRST_SIBLING_TOKENS, num_tokens, source)

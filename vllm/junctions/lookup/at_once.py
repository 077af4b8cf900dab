# SPDX-License-Identifier: Apache-2.0
"""Store lookups that ask as stock does: for every key there could be, in one call."""

from collections.abc import Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    TailKeyBoundary,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    MooncakeStoreWorker,
)
from vllm.v1.core.kv_cache_utils import BlockHash

from vllm.junctions.lookup.coordinator import LookupCoordinator
from vllm.junctions.lookup.found import Found
from vllm.junctions.lookup.probe import StoreProbe


class StockLookup(MooncakeStoreWorker):
    """A worker for the length of one lookup, which keeps the answers that it got.

    Stock's method returns the hit alone. So a lookup runs on an object of its own
    that has all of the worker's attributes but for the store.

    Attributes:
        answers: The existence answers; None if nothing was asked, or the store failed.

    Args:
        worker: Whose lookup it is; its constructor may not have run.
        store: What is asked.
    """

    def __init__(self, worker: MooncakeStoreWorker, store: StoreProbe) -> None:
        vars(self).update(vars(worker))
        self.store = store
        # The worker hands its statistics out and begins new ones at any time.
        self._record_kv_connector_operation = (  # type: ignore[method-assign]
            worker._record_kv_connector_operation
        )
        self.answers: ExternalCachedBlockPool | None = None

    def ask(
        self, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> MooncakeLookupResult:
        """Look up as stock does."""
        # Not what somebody put in the place of the worker's own method.
        return super().lookup(num_tokens, block_hashes)

    def _tail_key_boundaries(
        self,
        block_hashes: Sequence[BlockHash],
        hit_length: int,
        cached_block_pool: ExternalCachedBlockPool,
    ) -> tuple[TailKeyBoundary, ...]:
        # The last thing that the stock lookup does with its answers.
        self.answers = cached_block_pool
        return super()._tail_key_boundaries(block_hashes, hit_length, cached_block_pool)


def look_up(
    worker: MooncakeStoreWorker,
    store: StoreProbe,
    num_tokens: int,
    block_hashes: Sequence[BlockHash],
) -> Found | None:
    """Find the joint hit by stock's lookup, and the longest one from its answers.

    Args:
        worker: Whose lookup it is.
        store: What is asked; it knows what went wrong, where anything did.
        num_tokens: Tokens of the request.
        block_hashes: Its block hashes, one per hash unit.

    Returns:
        None if nothing could be stored, or the store failed.
    """
    lookup = StockLookup(worker, store)
    result = lookup.ask(num_tokens, block_hashes)
    answers = lookup.answers
    if answers is None:
        return None
    coord = worker.coord
    assert isinstance(coord, LookupCoordinator), coord
    question = (block_hashes, coord.align_lookup_length(num_tokens - 1), answers)
    longest, lagging = coord.full_attention_hit(*question), None
    if longest > result.hit_length:
        hits = coord.hits_by_group(*question)
        shortest = min(hits, key=hits.__getitem__)
        lagging = shortest if hits[shortest] < longest else None
    # Full attention alone is asked for a token less than the whole prompt, which within
    # a block may leave it less than the joint hit.
    longest = max(longest, result.hit_length)
    return Found(
        result.hit_length, longest, result.tail_key_boundaries, lagging, answers
    )

# SPDX-License-Identifier: Apache-2.0
"""Store lookups that ask only for the keys that could matter.

Stock asks at once for every full-attention block and for the tails of every sparse
group at every aligned position. Sparse retention stored next to none of those tails,
so nearly all answers are "no". Here vLLM's own search decides what is asked: it runs
over a pool that does not know its answers yet and gets them from the store in batches.

- Full attention is asked for first, from the front, with the tails at the top beside.
- The search in a sliding-window or Mamba group goes down from there, see
  :mod:`.tails`.

Why the result is stock's: the joint search is ``MooncakeStoreCoordinator``'s, the
search in full-attention groups ``FullAttentionManager``'s, and every answer that they
read is the store's. Replaced are only the two searches that read every block on their
way down. Both look for the highest position whose tail is complete; a position that
lacks any block of its tail is no match, whatever the other blocks are. And a block
that stock's mask leaves out is in no tail.
"""

from collections.abc import Callable, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    TailKeyBoundary,
)
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from vllm.junctions.errors import JunctionsError
from vllm.junctions.lookup.found import Found
from vllm.junctions.lookup.two_phase.asked_keys import (
    ABSENT,
    PRESENT,
    Ask,
    AskedKeys,
    Wanted,
)
from vllm.junctions.lookup.two_phase.hashes import LocatedHashes
from vllm.junctions.lookup.two_phase.plan import LookupPlan
from vllm.junctions.lookup.two_phase.tails import TailSearch

# As ``MooncakeStoreWorker._tail_key_boundaries``.
TailKeys = Callable[
    [Sequence[BlockHash], int, ExternalCachedBlockPool], tuple[TailKeyBoundary, ...]
]


class AskingPool(ExternalCachedBlockPool):
    """A pool for one lookup that asks the store for what it does not know yet.

    Attributes:
        hashes: The request's, for searches over this pool.
        tails: The searches in sparse groups.
    """

    def __init__(
        self,
        plan: LookupPlan,
        num_tokens: int,
        block_hashes: Sequence[BlockHash],
        ask: Ask,
    ) -> None:
        super().__init__(plan.hash_tokens)
        self._plan = plan
        self._num_tokens = num_tokens
        # What stock would not ask for is absent: nothing beyond these units.
        self._num_units = min(
            len(block_hashes),
            plan.coord.align_lookup_length(num_tokens) // plan.hash_tokens,
        )
        self.hashes = LocatedHashes(block_hashes, self._num_units)
        self._keys = AskedKeys(plan.key_stems, self.hashes, ask)
        self.tails = TailSearch(plan, self._keys)
        self._full_units = 0
        self._present = [self._present_block] * len(plan.key_stems)

    # What vLLM's search and the stock worker read

    def get_cached_block(
        self, block_hash: BlockHash, group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """Return a block for each group if all of them have the hash."""
        unit = self.hashes.units[block_hash]
        for group_id in group_ids:
            state = self._keys.states[group_id][unit]
            if state < ABSENT:
                self._ask_full_attention(unit, group_ids)
                state = self._keys.states[group_id][unit]
            if state != PRESENT:
                return None
        return self._present[: len(group_ids)]

    def contains(self, group_id: int, block_hash: BlockHash) -> bool:
        """Return whether a group has a loadable key for this hash."""
        unit = self.hashes.units[block_hash]
        states = self._keys.states[group_id]
        if states[unit] < ABSENT:
            self._keys.ask(Wanted(group_id, [unit]))
        return states[unit] == PRESENT

    def longest_tail_hit(
        self, group_ids: list[int], max_length: int, drop: bool
    ) -> int:
        """Return the longest hit in tokens; see :class:`.managers.TailPool`."""
        return self.tails.longest_hit(group_ids, max_length, drop)

    # Asking

    def ask_first(self) -> None:
        """Ask for full attention from the front, and for the tails at the top."""
        wanted = self._extend_full_attention()
        if self._plan.coord.enable_partial_hash_hits and self._num_units:
            wanted += self._inside_block(self._num_units - 1)
        wanted += self.tails.first_wanted(self._highest_position())
        self._keys.ask(*wanted)

    def ask_last_keys(self, hit_length: int) -> None:
        """Ask for what tells the key of each group's last block of a partial hit."""
        unit = hit_length // self.hash_block_size - 1
        if unit < 0 or not self._plan.coord.enable_partial_hash_hits:
            return
        wanted = []
        for group in self._plan.coord.attention_groups:
            units = group.spec.block_size // self.hash_block_size
            end = min((unit // units + 1) * units, self._num_units)
            for group_id in group.group_ids:
                if self._keys.states[group_id][unit] != PRESENT:
                    wanted.append(Wanted(group_id, range(unit, end)))
        self._keys.ask(*wanted)

    # Full attention

    def _ask_full_attention(self, unit: int, group_ids: list[int]) -> None:
        while unit >= self._full_units:
            self._keys.ask(*self._extend_full_attention())
        if any(self._keys.states[group_id][unit] < ABSENT for group_id in group_ids):
            self._keys.ask(*self._inside_block(unit))

    def _extend_full_attention(self) -> list[Wanted]:
        """Return the next blocks of all full-attention groups, from the front."""
        start = self._full_units
        end = max(start * self._plan.batches.full_growth, self._plan.first_full_units)
        end = min(end, self._num_units)
        self._full_units = end
        return [
            Wanted(group_id, range(start + units - 1, end, units))
            for group_ids, units in self._plan.full_groups
            for group_id in group_ids
        ]

    def _inside_block(self, unit: int) -> list[Wanted]:
        """Return all units of the block of each full-attention group around one."""
        return [
            Wanted(group_id, range(start, min(start + units, self._num_units)))
            for group_ids, units in self._plan.full_groups
            for start in [unit // units * units]
            for group_id in group_ids
        ]

    def _highest_position(self) -> int:
        """Return the highest position at which the request could resume."""
        coord = self._plan.coord
        position = coord.align_lookup_length(
            min(self._num_tokens - 1, self._num_units * self.hash_block_size)
        )
        if coord.eagle_group_ids:
            top = self._num_units * self.hash_block_size - coord.align_unit
            position = min(position, top)
        return max(position, 0)


class StoreCallError(JunctionsError):
    """The store raised instead of answering."""


def look_up(
    plan: LookupPlan,
    num_tokens: int,
    block_hashes: Sequence[BlockHash],
    ask: Ask,
    tail_keys: TailKeys,
) -> Found | None:
    """Find the joint hit and the longest one; None if nothing could be stored.

    Source: gives what ``MooncakeStoreWorker.lookup`` finds.

    Args:
        plan: The layout.
        num_tokens: Tokens of the request.
        block_hashes: Its block hashes, one per hash unit.
        ask: The call to the store. Whatever it raises ends the lookup.
        tail_keys: The worker's, for the entries of a hit.
    """
    coord = plan.search
    lookup_tokens = coord.align_lookup_length(num_tokens)
    if not block_hashes or lookup_tokens <= 0:
        return None
    pool = AskingPool(plan, num_tokens, block_hashes, ask)
    pool.ask_first()
    _, hit_length = coord.find_longest_cache_hit(pool.hashes, lookup_tokens, pool)
    usable_tokens = coord.align_lookup_length(num_tokens - 1)
    if hit_length >= num_tokens:
        # The last token is always computed.
        if usable_tokens <= 0:
            return None
        _, hit_length = coord.find_longest_cache_hit(pool.hashes, usable_tokens, pool)
    pool.ask_last_keys(hit_length)
    lagging = pool.tails.lagging_group
    tails = tail_keys(pool.hashes, hit_length, pool)
    if hit_length >= usable_tokens:
        return Found(hit_length, hit_length, tails)
    pool.tails.skips_positions = False
    longest = coord.full_attention_hit(pool.hashes, usable_tokens, pool)
    lagging = lagging if longest > hit_length else None
    return Found(hit_length, max(longest, hit_length), tails, lagging)

# SPDX-License-Identifier: Apache-2.0
"""Junctions on the lookup channel between scheduler and rank-0 worker.

The stock response is ``hit_length`` (u32, big-endian) and then 8-byte entries of
``group_id`` and ``tokens`` (u32 each). A junction is one more such entry whose
group id is :data:`JUNCTION_GROUP_ID`, placed after the ordinary ones::

    hit_length | group 0, 3584 | group 1, 3584 | 0xFFFFFFFF, 3840
                 ordinary tail-key boundaries    junction

No group has that id, so a reader that predates junctions looks the entry up
under no group and ignores it; a payload without such entries reads as before.
Encoding and decoding stay with the stock functions: this module only puts entries
into a result and takes them out again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    TailKeyBoundary,
)

from vllm.junctions.rules.boundaries import split_valid_boundaries

# The largest u32: no KV-cache group can have it.
JUNCTION_GROUP_ID = 0xFFFFFFFF


@dataclass
class JunctionLookupResult(MooncakeLookupResult):
    """A lookup result with the junctions taken out of its entries.

    Attributes:
        junctions: Token positions, ascending and distinct, each within the
            request that was looked up.
        num_dropped: Junction entries that were 0 or past the request.
    """

    junctions: tuple[int, ...] = ()
    num_dropped: int = 0


def add_junctions(
    result: MooncakeLookupResult, junctions: Iterable[int]
) -> MooncakeLookupResult:
    """Return ``result`` with one sentinel entry appended per junction.

    Source: extends ``MooncakeStoreWorker.lookup``; the outcome goes through the
    stock ``encode_lookup_response``.

    Args:
        result: The stock lookup result.
        junctions: Token positions to report.
    """
    entries = tuple(TailKeyBoundary(JUNCTION_GROUP_ID, tokens) for tokens in junctions)
    return MooncakeLookupResult(result.hit_length, result.tail_key_boundaries + entries)


def take_junctions(
    result: MooncakeLookupResult, num_tokens: int
) -> JunctionLookupResult:
    """Separate junction entries from the ordinary ones.

    Args:
        result: What the stock ``decode_lookup_response`` returned.
        num_tokens: Tokens of the request; junctions beyond are dropped.
    """
    ordinary = tuple(
        entry
        for entry in result.tail_key_boundaries
        if entry.group_id != JUNCTION_GROUP_ID
    )
    reported = [
        entry.num_tokens
        for entry in result.tail_key_boundaries
        if entry.group_id == JUNCTION_GROUP_ID
    ]
    junctions, num_dropped = split_valid_boundaries(reported, num_tokens)
    return JunctionLookupResult(result.hit_length, ordinary, junctions, num_dropped)


@dataclass(frozen=True)
class HitUnits:
    """What the lengths in an answer are multiples of, in tokens.

    Attributes:
        hash_block_size: Tokens per block hash.
        hit: Hits are multiples of it: the scheduler block, or the hash block where
            partial hash hits are on.
        block_size: Tokens per scheduler block.
    """

    hash_block_size: int = 1
    hit: int = 1
    block_size: int = 1


def check_lookup_result(
    result: MooncakeLookupResult, num_tokens: int, units: HitUnits
) -> None:
    """Refuse an answer that cannot belong to the request that asked.

    A hit never covers the whole request (its last token is recomputed). A loader
    turns every length into an index of the request's block hashes: one that is out
    of range would load other bytes than promised, and a hit in the middle of a block
    can leave nothing to load, which ends in a request that waits for ever. A tail
    lies at the hit or, if the hit ends within a block, above it in the same block.

    Args:
        result: Decoded answer, junctions already taken out.
        num_tokens: Tokens of the request.
        units: What lengths are multiples of.

    Raises:
        ValueError: The hit or an entry cannot be one of this request.
    """
    hit_length = result.hit_length
    if hit_length % units.hit or hit_length >= max(num_tokens, 1):
        raise ValueError(
            f"hit of {hit_length} tokens for a request of {num_tokens}; hits are "
            f"multiples of {units.hit} tokens"
        )
    end_of_block = -(-hit_length // units.block_size) * units.block_size
    last = min(end_of_block, num_tokens)
    for entry in result.tail_key_boundaries:
        tokens = entry.num_tokens
        if tokens % units.hash_block_size or not max(hit_length, 1) <= tokens <= last:
            raise ValueError(
                f"tail entry of group {entry.group_id} at {tokens} tokens beside a hit "
                f"of {hit_length}, in a request of {num_tokens} with "
                f"{units.hash_block_size} tokens per hash"
            )

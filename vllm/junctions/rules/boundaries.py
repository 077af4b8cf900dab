# SPDX-License-Identifier: Apache-2.0
"""Where siblings part: the arithmetic of shared-prefix junctions.

Pure functions over token positions. A *junction* is a position up to which some
KV-cache group has a prefix cached while the joint hit (usable by all groups) is
shorter. Nothing in this module knows about vLLM's objects.
"""

from collections.abc import Iterable


def junction_boundaries(
    hit_length: int,
    longest_hit_length: int,
    scheduler_block_size: int,
    use_eagle: bool,
) -> tuple[int, ...]:
    """Return the positions at which sparse groups should keep what a hit needs.

    The same rule serves local hits and store hits. Without EAGLE the one position
    is the longest single-group hit. With EAGLE a sibling that parts inside the
    proof block above that position cannot prove it, and lands one scheduler block
    lower; both positions are kept then.

    Worked numbers, scheduler block 256, EAGLE on: hit 0 and longest 3840 give
    ``(3584, 3840)``; longest 256 gives ``(256,)``; hit 3584 gives ``(3840,)``.

    Source: extends what ``KVCacheManager.get_computed_blocks`` calls
    ``shared_prefix_boundary``.

    Args:
        hit_length: Tokens that every KV-cache group can reuse (the joint hit).
        longest_hit_length: Tokens of the longest hit of any single group.
        scheduler_block_size: Tokens per scheduler block, the unit of joint hits.
        use_eagle: Whether any group drops its last matched block for a drafter.

    Returns:
        Ascending, distinct, positive token positions above ``hit_length``; empty
        when no group reaches further than the joint hit.

    Raises:
        ValueError: A length is negative or the block size is not positive.
    """
    _check_lengths(hit_length, longest_hit_length, scheduler_block_size)
    if longest_hit_length <= hit_length:
        return ()
    positions = [longest_hit_length]
    if use_eagle:
        positions.insert(0, longest_hit_length - scheduler_block_size)
    return tuple(position for position in positions if position > hit_length)


def _check_lengths(
    hit_length: int, longest_hit_length: int, scheduler_block_size: int
) -> None:
    if hit_length < 0 or longest_hit_length < 0:
        raise ValueError(
            "hit lengths are token counts and cannot be negative: "
            f"hit_length={hit_length}, longest_hit_length={longest_hit_length}"
        )
    if scheduler_block_size <= 0:
        raise ValueError(
            f"scheduler_block_size must be positive, got {scheduler_block_size}"
        )


def merge_boundaries(*parts: Iterable[int]) -> tuple[int, ...]:
    """Return the union of several boundary tuples, ascending and distinct.

    ``merge_boundaries((3840,), (3584, 3840))`` is ``(3584, 3840)``.
    """
    return tuple(sorted({position for part in parts for position in part}))


def split_valid_boundaries(
    positions: Iterable[int], num_tokens: int
) -> tuple[tuple[int, ...], int]:
    """Separate the junctions that a request can have from those it cannot.

    With a request of 4000 tokens, ``(0, 3840, 9000)`` gives ``((3840,), 2)``.

    Args:
        positions: Token positions as they came over the wire.
        num_tokens: Tokens of the request that asked.

    Returns:
        ``(valid, num_dropped)``: the positions in ``1..num_tokens``, ascending and
        distinct, and how many entries lay outside.
    """
    positions = tuple(positions)
    inside = [position for position in positions if 0 < position <= num_tokens]
    return merge_boundaries(inside), len(positions) - len(inside)


def chunk_stops(
    local_boundary: int,
    junctions: tuple[int, ...],
    declared: tuple[int, ...] = (),
    predicted: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Return where prefill chunks of a recurrent model stop for junctions.

    A state exists only where a chunk ends, and each stop costs a step. So there are
    two at most. vLLM's own stop comes first where it has one: requests that enter in
    the same pass hit what the first chunk reaches, and must not hit less than they
    would without the others. What was found comes before what was declared, and that
    before what was predicted.

    A store junction pair ``(288, 304)`` and no local boundary gives ``(288, 304)``;
    a local boundary of 304 beside ``(256, 272)`` gives ``(304,)``; 304 beside
    ``(320, 336)`` gives ``(304, 336)``. One junction at 304 and ``(64, 128)``
    declared give ``(128, 304)``.

    Args:
        local_boundary: vLLM's scalar, in tokens; 0 for none.
        junctions: Junctions that lookups found, ascending token positions.
        declared: Positions that the client declared, likewise.
        predicted: Positions that were predicted, likewise.

    Returns:
        Ascending, distinct token positions, none if there are none.
    """
    above = [position for position in junctions if position > local_boundary]
    stops = [local_boundary, *above[-1:]] if local_boundary else above[-2:]
    for extra in (declared, predicted):
        room = 2 - len(stops)
        more = [position for position in extra if position not in stops]
        stops += more[-room:] if room > 0 else []
    return tuple(sorted(stops))


def at_chunk_end(position: int, start: int, chunk_tokens: int) -> int:
    """Return where a chunk ends anyway, if that is just below a position.

    A chunk that ended at ``position`` would add a step of few tokens then. Just below
    is within an eighth of a chunk. Chunks of 8,192 tokens from 0 on: 8,704 gives
    8,192, and 12,288 stays.

    Args:
        position: Where a chunk could be made to end, in tokens.
        start: Where the first chunk begins.
        chunk_tokens: Tokens of a chunk; 0 leaves the position as it is.
    """
    if not chunk_tokens or position - start <= chunk_tokens:
        return position
    over = (position - start) % chunk_tokens
    return position - over if over <= chunk_tokens // 8 else position

# SPDX-License-Identifier: Apache-2.0
"""What of a layout decides where prompts can resume, and how many blocks tails have."""

from functools import cached_property

from vllm.junctions.plan.policies import Policy
from vllm.junctions.record.format import Layout


class LayoutError(ValueError):
    """A layout that cannot be planned for; the message says why."""


class Shape:
    """Numbers of a layout, in tokens.

    Attributes:
        layout: The layout.
        block: Tokens of a scheduler block, what hits are multiples of.
        proof: Tokens above a position that have to be the same for it to be hit: the
            longest block that a group drops; 0 without a drafter.
        tail_proof: The same of groups that keep tails.
        window: The shortest tail of a group.
        overlaps: Whether tails can be longer than a scheduler block, so that two of
            them may cover positions in between.
    """

    def __init__(self, layout: Layout) -> None:
        if not layout.full_groups:
            raise LayoutError(
                f"{layout.name} has no full attention, so no prefix of it is reused."
            )
        if layout.partial_hits or any(group.kind == "state" for group in layout.groups):
            raise LayoutError(
                f"{layout.name} has recurrent states (Mamba): which of them are kept "
                "depends on where prefill chunks end, and that is not in a trace."
            )
        self.layout = layout
        self.block = layout.scheduler_block_tokens
        self.proof = max(
            (group.block_tokens for group in layout.groups if group.drops), default=0
        )
        sparse = layout.sparse_groups
        self.tail_proof = max(
            (group.block_tokens for group in sparse if group.drops), default=0
        )
        tails = [group.tail_blocks * group.block_tokens for group in sparse]
        self.window = min(tails, default=0)
        self.overlaps = bool(tails) and self.window > self.block
        self._full_drop = max(
            (group.block_tokens for group in layout.full_groups if group.drops),
            default=0,
        )
        self._all_full_drop = all(group.drops for group in layout.full_groups)

    def floor(self, num_tokens: int) -> int:
        """Return the last position up to so many tokens."""
        return num_tokens // self.block * self.block

    def top(self, num_tokens: int, num_shared: int) -> int:
        """Return the last position that a prompt could hit.

        Args:
            num_tokens: Of the prompt, whose last token is always computed.
            num_shared: Tokens that it shares with what is cached.
        """
        provable = max(num_shared - self.proof, 0)
        return self.floor(min(num_tokens - 1, provable))

    def longest(self, num_tokens: int, num_shared: int) -> int:
        """Return the longest hit of full attention alone."""
        bound = self.floor(num_tokens - 1)
        plain = self.floor(min(bound, num_shared))
        if not self._all_full_drop:
            return plain
        return self.floor(max(min(num_shared - self._full_drop, bound), 0))

    def replays(self, num_tokens: int) -> tuple[int, ...]:
        """Return where vLLM keeps tails for the same prompt, or one that goes on.

        Source: ``replay_boundaries`` of vLLM's ``kv_cache_coordinator``.
        """
        resend = self.floor(num_tokens - 1)
        if not self.layout.drops_eagle_block:
            return (resend,)
        extension = self.floor(num_tokens)
        block = self.block
        return tuple(sorted({max(resend - block, 0), max(extension - block, 0)}))

    def is_dense(self, policy: Policy) -> bool:
        """Return whether a policy keeps tails at all positions."""
        interval = policy.retention_interval
        if interval is None or not self.layout.sparse_groups:
            return True
        return interval > 0 and all(
            group.tail_blocks + group.drops >= interval // group.block_tokens
            for group in self.layout.sparse_groups
        )

    @cached_property
    def tail_blocks(self) -> int:
        """Blocks of a tail without what proves it, all groups together."""
        return sum(group.tail_blocks for group in self.layout.sparse_groups)

    def low_blocks(self, position: int) -> int:
        """Return the blocks of a tail at a position, near a prompt's start fewer."""
        return sum(
            min(group.tail_blocks, position // group.block_tokens)
            for group in self.layout.sparse_groups
        )

    def proof_blocks(self) -> int:
        """Return the blocks that prove a tail."""
        return sum(group.drops for group in self.layout.sparse_groups)

    def full_blocks(self, low: int, high: int) -> int:
        """Return how many blocks of full attention end in ``low < end <= high``."""
        return sum(
            high // group.block_tokens - low // group.block_tokens
            for group in self.layout.full_groups
        )

    def dense_blocks(self, low: int, high: int, interval: int | None) -> int:
        """Return the blocks that dense retention keeps of tokens ``low`` to ``high``.

        ``low`` is where a prompt parts, ``high`` a multiple of the scheduler block.
        """
        return sum(
            self._dense_blocks(group, high, interval)
            - self._dense_blocks(group, low, interval)
            for group in self.layout.sparse_groups
        )

    def _dense_blocks(self, group: object, end: int, interval: int | None) -> int:
        size, need = group.block_tokens, group.tail_blocks + group.drops  # type: ignore
        per_segment = (interval or self.block) // size
        num_blocks = end // size
        if need >= per_segment:
            return num_blocks
        # Blocks i with (i - drops) % per_segment >= per_segment - need, i >= drops.
        whole, rest = divmod(num_blocks - group.drops, per_segment)  # type: ignore
        if num_blocks <= group.drops:  # type: ignore
            return 0
        return whole * need + max(rest - (per_segment - need), 0)

    def lookup_keys(self, num_tokens: int) -> int:
        """Return how many keys a lookup names that asks for all at once."""
        asked = self.floor(num_tokens)
        return self.full_blocks(0, asked) + self.dense_blocks(0, asked, None)

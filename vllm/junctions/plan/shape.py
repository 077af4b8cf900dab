# SPDX-License-Identifier: Apache-2.0
"""What of a layout decides where prompts can resume, and how many blocks tails have."""

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
        eagle: Whether any group drops its last matched block.
        proof_blocks: Blocks that prove a tail, all groups together.
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
        self.eagle = layout.drops_eagle_block
        # Per group: tokens of a block, blocks of a tail, and of what proves it.
        self._sparse = [(g.block_tokens, g.tail_blocks, int(g.drops)) for g in sparse]
        self._full = [group.block_tokens for group in layout.full_groups]
        self.proof_blocks = sum(proof for _, _, proof in self._sparse)
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
        if not self.eagle:
            return (resend,)
        lower = max(resend - self.block, 0)
        upper = max(self.floor(num_tokens) - self.block, 0)
        return (lower,) if lower == upper else (lower, upper)

    def is_dense(self, policy: Policy) -> bool:
        """Return whether a policy keeps tails at all positions."""
        interval = policy.retention_interval
        if interval is None or not self.layout.sparse_groups:
            return True
        return interval > 0 and all(
            group.tail_blocks + group.drops >= interval // group.block_tokens
            for group in self.layout.sparse_groups
        )

    def low_blocks(self, position: int) -> int:
        """Return the blocks of a tail at a position, near a prompt's start fewer."""
        return sum(min(need, position // size) for size, need, _ in self._sparse)

    def full_blocks(self, low: int, high: int) -> int:
        """Return how many blocks of full attention end in ``low < end <= high``."""
        return sum(high // size - low // size for size in self._full)

    def dense_blocks(self, low: int, high: int, interval: int | None) -> int:
        """Return the blocks that fixed tails have of tokens ``low`` to ``high``.

        Args:
            low: Where a prompt parts.
            high: Where it ends, a multiple of the scheduler block.
            interval: Tokens from tail to tail; None: a scheduler block.
        """
        num_blocks = 0
        for size, tail_blocks, proof in self._sparse:
            need, per_segment = tail_blocks + proof, (interval or self.block) // size
            for end, sign in ((high // size, 1), (low // size, -1)):
                if need >= per_segment:
                    num_blocks += sign * end
                elif end > proof:
                    # Blocks whose place in their segment, the proof's taken off, is
                    # among the last ``need``.
                    whole, rest = divmod(end - proof, per_segment)
                    kept = whole * need + max(rest - (per_segment - need), 0)
                    num_blocks += sign * kept
        return num_blocks

    def lookup_keys(self, num_tokens: int) -> int:
        """Return how many keys a lookup names that asks for all at once."""
        asked = self.floor(num_tokens)
        return self.full_blocks(0, asked) + self.dense_blocks(0, asked, None)

# SPDX-License-Identifier: Apache-2.0
"""What a recording says: a first line of its own, then one line a request.

Lines of requests are Mooncake's trace format, with a few fields more.
"""

import math

import msgspec

from vllm.junctions.rules.tails import TailShape

# 1: the first.
FORMAT_VERSION = 1


class GroupLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """One KV-cache group that prefixes are cached of.

    Attributes:
        kind: ``full``, ``window`` or ``state`` (Mamba).
        block_tokens: Tokens per block.
        window_tokens: What a sliding window sees, the token at hand included; with
            what a drafter of several layers needs below it. 0 for other kinds.
        drops: Whether hits drop the group's last matched block for a drafter.
    """

    kind: str
    block_tokens: int
    window_tokens: int = 0
    drops: bool = False

    @property
    def tail_blocks(self) -> int:
        """Blocks below a position that a hit there needs; 0: all of them.

        A window of 128 in blocks of 64 needs 2: the token at hand is in it too.
        """
        if self.kind == "full":
            return 0
        return max(-(-(self.window_tokens - 1) // self.block_tokens), 1)


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """KV-cache groups of a served model, as far as prefix reuse goes.

    Attributes:
        name: What to call it.
        groups: In the order of the store's group ids.
        scheduler_block_tokens: What hits are multiples of.
        hash_block_tokens: Tokens per block hash.
        block_bytes: Bytes of one stored value, of one rank; 0 where not known.
        retention_interval: As ``prefix_cache_retention_interval``.
        speculative: Method of the drafter, if there is one.
        partial_hits: Whether hits end within blocks, at hashes.
        summary: What it stands for, in a line.
    """

    name: str
    groups: tuple[GroupLayout, ...]
    scheduler_block_tokens: int
    hash_block_tokens: int
    block_bytes: int = 0
    retention_interval: int | None = 0
    speculative: str | None = None
    partial_hits: bool = False
    summary: str = ""

    @property
    def full_groups(self) -> tuple[GroupLayout, ...]:
        """Groups of full attention."""
        return tuple(group for group in self.groups if group.kind == "full")

    @property
    def sparse_groups(self) -> tuple[GroupLayout, ...]:
        """Groups that need no more of a prefix than a tail."""
        return tuple(group for group in self.groups if group.kind != "full")

    @property
    def drops_eagle_block(self) -> bool:
        """Whether any group drops its last matched block."""
        return any(group.drops for group in self.groups)

    @property
    def grain_tokens(self) -> int:
        """Tokens of the shortest piece of a prompt that can change a hit.

        A scheduler block, or the block by which a drafter's group proves a position:
        scheduler blocks of 256 and a dropping group of 64: 64.
        """
        if self.partial_hits:
            return self.hash_block_tokens
        proofs = [group.block_tokens for group in self.groups if group.drops]
        return math.gcd(self.scheduler_block_tokens, *proofs)

    @property
    def tails(self) -> tuple[TailShape, ...]:
        """The tails of the groups that are not full attention."""
        return tuple(
            TailShape(
                group.block_tokens,
                self.scheduler_block_tokens,
                (group.tail_blocks, group.tail_blocks + 1),
                drops=group.drops,
            )
            for group in self.sparse_groups
        )


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line of a recording.

    Attributes:
        junctions_recording: The format's version.
        block_tokens: Tokens per hash id.
        start_ms: When the recording began, in ms since 1970; timestamps count from it.
        id_space: Recordings with the same value have comparable hash ids.
        layout: Of the model that was served.
        engine: Which engine of a server wrote it.
        junctions: Whether junctions were on.
        predicted_tails: ``junctions_predict``.
        local_blocks: Blocks of the engine's own KV cache.
        version: Of this package.
        vllm_version: Of vLLM.
    """

    junctions_recording: int
    block_tokens: int
    start_ms: int
    id_space: str
    layout: Layout
    engine: str = ""
    junctions: bool = True
    predicted_tails: int = 0
    local_blocks: int = 0
    version: str = ""
    vllm_version: str = ""


class RecordedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished request.

    Attributes:
        timestamp: When it arrived, in ms since the recording began.
        input_length: Tokens of its prompt.
        output_length: Tokens that it generated.
        hash_ids: One for each ``block_tokens`` of the prompt, the last one for the
            rest; the same numbers up to a block mean the same prompt up to there.
        local_hit: Prompt tokens found in the engine's own cache.
        store_hit: Prompt tokens loaded from the store.
        ttft_ms: From its arrival to its first token.
        prefill_ms: From its blocks' allocation to its first token, loads included.
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    local_hit: int = 0
    store_hit: int = 0
    ttft_ms: float | None = None
    prefill_ms: float | None = None

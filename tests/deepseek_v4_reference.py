# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's attention metadata, one token at a time and without tensors.

Written from what the metadata mean, apart from the test bed's stand-ins. Run as a
program it prints what a running vLLM with the stand-ins makes of a batch.
"""

import json
import random
import sys
from dataclasses import dataclass

import torch

PAD = -1


@dataclass(frozen=True)
class Batch:
    """A step's requests: tokens computed before, tokens of the step, blocks."""

    context_lens: list[int]
    query_lens: list[int]
    block_table: list[list[int]]
    padded_tokens: frozenset[int] = frozenset()

    @classmethod
    def random(cls, seed: int, num_requests: int, longest_query: int) -> "Batch":
        rng = random.Random(seed)
        return cls(
            context_lens=[
                rng.choice((0, rng.randrange(600))) for _ in range(num_requests)
            ],
            query_lens=[rng.randint(1, longest_query) for _ in range(num_requests)],
            block_table=[rng.sample(range(1, 900), 300) for _ in range(num_requests)],
        )

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """``(request, position)`` of each token."""
        return [
            (request, context + offset)
            for request, (context, query) in enumerate(
                zip(self.context_lens, self.query_lens, strict=True)
            )
            for offset in range(query)
        ]

    @property
    def query_start_loc(self) -> torch.Tensor:
        starts = [0]
        for query in self.query_lens:
            starts.append(starts[-1] + query)
        return torch.tensor(starts, dtype=torch.int32)

    @property
    def seq_lens(self) -> torch.Tensor:
        totals = zip(self.context_lens, self.query_lens, strict=True)
        return torch.tensor([sum(pair) for pair in totals], dtype=torch.int32)

    @property
    def blocks(self) -> torch.Tensor:
        return torch.tensor(self.block_table, dtype=torch.int32)

    @property
    def slot_mapping(self) -> torch.Tensor:
        slots = [
            PAD if token in self.padded_tokens else token
            for token in range(len(self.tokens))
        ]
        return torch.tensor(slots, dtype=torch.int64)


def requests(batch: Batch) -> list[int]:
    return [request for request, _ in batch.tokens]


def compressed_slots(batch: Batch, block_size: int, ratio: int) -> list[int]:
    slots = []
    for token, (request, position) in enumerate(batch.tokens):
        if token in batch.padded_tokens or position % ratio != ratio - 1:
            slots.append(PAD)
            continue
        block, row = divmod(position // ratio, block_size)
        slots.append(batch.block_table[request][block] * block_size + row)
    return slots


def window_slots(
    batch: Batch, window: int, block_size: int, replay_start: list[int] | None = None
) -> list[list[int]]:
    rows = []
    for token, (request, position) in enumerate(batch.tokens):
        row = []
        for seen in range(position + 1):
            visible = position - seen < window
            if replay_start is not None:
                visible = visible and seen >= replay_start[request]
            if visible and token not in batch.padded_tokens:
                block, offset = divmod(seen, block_size)
                row.append(batch.block_table[request][block] * block_size + offset)
        rows.append(row)
    return rows


def gather_lens(batch: Batch, num_decodes: int, window: int) -> list[int]:
    pairs = list(zip(batch.context_lens, batch.query_lens, strict=True))
    return [query + min(context, window - 1) for context, query in pairs[num_decodes:]]


def scored_states(batch: Batch, ratio: int) -> list[tuple[int, int]]:
    """First state and end of each token's row, all requests' states in one row."""
    starts = [0]
    for total in batch.seq_lens.tolist():
        starts.append(starts[-1] + total // ratio)
    return [
        (starts[request], starts[request] + (position + 1) // ratio)
        for request, position in batch.tokens
    ]


def request_of_state(batch: Batch, ratio: int) -> list[int]:
    return [
        request
        for request, total in enumerate(batch.seq_lens.tolist())
        for _ in range(total // ratio)
    ]


def _through_vllm(batch: Batch) -> dict[str, object]:
    from vllm.models.deepseek_v4.cpu.cpu_mla import (
        DeepseekV4CPUSparseSWAMetadataBuilder,
    )
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import indexer, sparse_swa
    from vllm.v1.attention.backends.mla.compressor_utils import (
        get_compressed_slot_mapping,
    )
    from vllm.v1.attention.ops.metadata import compute_token_to_req_indices

    current_platform.register_triton_kernel_overrides()
    num_tokens, num_requests = len(batch.tokens), len(batch.query_lens)
    starts, lens, blocks = batch.query_start_loc, batch.seq_lens, batch.blocks
    owners = compute_token_to_req_indices(
        starts,
        torch.full((num_tokens + 9,), 77, dtype=torch.int32),
        num_tokens,
        num_tokens,
    )
    compressed = get_compressed_slot_mapping(
        num_tokens, batch.slot_mapping, starts, lens, blocks, 64, 4
    )
    window = torch.zeros(num_tokens, 1, 128, dtype=torch.int32)
    window_lens = torch.zeros(num_tokens, dtype=torch.int32)
    zeros = torch.zeros(num_requests, dtype=torch.int32)
    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL(
        window, window_lens, 128, 128, window_lens, window_lens, starts, lens, owners,
        batch.slot_mapping >= 0, blocks, 64, zeros,
        num_tokens=num_tokens, token_offset=0,
    )  # fmt: skip
    gathered = torch.zeros(num_requests, dtype=torch.int32)
    sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL(
        gathered, lens, starts, zeros, num_requests, 0, 128
    )
    chunk = indexer.build_prefill_chunk_metadata(
        0, num_requests, starts, starts, lens, lens // 4, lens // 4, blocks, 4
    )
    scheduler = DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler(None, 1)
    return {
        "requests": owners.tolist(),
        "compressed_slots": compressed.tolist(),
        "window_slots": [
            row[:length]
            for row, length in zip(
                window.squeeze(1).tolist(), window_lens.tolist(), strict=True
            )
        ],
        "gather_lens": gathered.tolist(),
        "scored_states": list(
            zip(chunk.cu_seqlen_ks.tolist(), chunk.cu_seqlen_ke.tolist(), strict=True)
        ),
        "request_of_state": chunk.token_to_seq.tolist(),
        "tile_plans": sorted(scheduler),
    }


if __name__ == "__main__":
    from testbed.deepseek_v4.stand_ins import register

    register()
    register()
    json.dump(_through_vllm(Batch.random(*map(int, sys.argv[1:]))), sys.stdout)

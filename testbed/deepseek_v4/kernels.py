# SPDX-License-Identifier: Apache-2.0
"""Attention metadata of DeepSeek-V4, computed with PyTorch.

A batch is described by ``query_start_loc`` (request ``r`` owns the batch's tokens
``[query_start_loc[r], query_start_loc[r + 1])``) and ``seq_lens`` (a request's
tokens so far, those of this batch included). Results are written into the given
tensors, as vLLM's kernels do.
"""

import torch

PAD_SLOT = -1


def request_of_each_token(
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    num_requests: int,
    num_mapped_tokens: int,
    num_tokens: int,
) -> None:
    """Write which request each of the first ``num_tokens`` tokens belongs to.

    Starts ``[0, 3, 5]`` give ``[0, 0, 0, 1, 1]``. Tokens past the last request
    belong to it; those from ``num_mapped_tokens`` on count as request 0.
    """
    tokens = torch.arange(num_tokens)
    ends = query_start_loc[1 : num_requests + 1]
    requests = torch.searchsorted(ends, tokens, right=True)
    requests.clamp_(max=num_requests - 1)
    requests[num_mapped_tokens:] = 0
    out[:num_tokens] = requests.to(out.dtype)


def _positions(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_requests: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(request, position in it)`` of each token of a batch."""
    starts = query_start_loc[: num_requests + 1].long()
    lengths = starts.diff()
    requests = torch.repeat_interleave(torch.arange(num_requests), lengths)
    first_positions = seq_lens[:num_requests].long() - lengths
    offsets = torch.arange(len(requests)) - (starts[:-1] - starts[0])[requests]
    return requests, first_positions[requests] + offsets


def _slots(
    block_table: torch.Tensor,
    requests: torch.Tensor,
    indices: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Return the cache slot of each request's entry number ``indices``."""
    block_ids = block_table[requests, indices // block_size].long()
    return block_ids * block_size + indices % block_size


def compressed_slots(
    out: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
) -> None:
    """Write the slot in which each token's compressed state goes.

    Every ``compress_ratio`` tokens share a state, which the last of them writes;
    the others, and tokens without a slot of their own, get ``PAD_SLOT``.

    Args:
        out: One entry per token of the batch.
        block_size: States per block.
    """
    requests, positions = _positions(query_start_loc, seq_lens, len(block_table))
    tokens = torch.arange(len(requests)) + int(query_start_loc[0])
    writes = (positions + 1) % compress_ratio == 0
    writes &= slot_mapping[tokens] != PAD_SLOT
    states = (positions // compress_ratio).clamp(min=0) * writes
    slots = _slots(block_table, requests, states, block_size)
    out[tokens] = torch.where(writes, slots, PAD_SLOT).to(out.dtype)


def window_slots(
    out_slots: torch.Tensor,
    out_lens: torch.Tensor,
    window_tokens: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    request_of_token: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    replay_start: torch.Tensor,
    num_tokens: int,
    first_token: int,
) -> None:
    """Write which slots each token's sliding window reads, and how many.

    A token's window are the ``window_tokens`` positions that end at its own, as
    far as they exist and are not below its request's ``replay_start``.

    Args:
        out_slots: A row per token, filled up with ``PAD_SLOT``.
        out_lens: Slots in each row; 0 for a token that is not valid.
        first_token: The batch's token that row 0 is for.
    """
    tokens = torch.arange(first_token, first_token + num_tokens)
    requests = request_of_token[tokens].long()
    ends = query_start_loc[requests + 1].long()
    positions = seq_lens[requests].long() - ends + tokens
    first = (positions - window_tokens + 1).clamp(min=0)
    first = torch.maximum(first, replay_start[requests].long())
    lens = (positions - first + 1).clamp(min=0) * is_valid_token[tokens]
    columns = torch.arange(out_slots.shape[-1])
    used = columns < lens.unsqueeze(1)
    indices = (first.unsqueeze(1) + columns).clamp(min=0) * used
    slots = _slots(block_table, requests.unsqueeze(1), indices, block_size)
    rows = torch.where(used, slots, PAD_SLOT).to(out_slots.dtype)
    out_slots.view(out_slots.shape[0], -1)[:num_tokens] = rows
    out_lens[:num_tokens] = lens.to(out_lens.dtype)


def prefill_gather_lens(
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    replay_start: torch.Tensor,
    num_prefills: int,
    num_decodes: int,
    window_tokens: int,
) -> None:
    """Write how many tokens each prefill's windows reach, its own included."""
    last = num_decodes + num_prefills
    query_lens = query_start_loc[num_decodes : last + 1].diff()
    context = seq_lens[num_decodes:last] - query_lens - replay_start[num_decodes:last]
    out[:num_prefills] = query_lens + context.clamp(0, window_tokens - 1)


def prefill_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    state_starts: torch.Tensor,
    row_starts: torch.Tensor,
    out_request_of_state: torch.Tensor,
    out_first_state: torch.Tensor,
    out_end_state: torch.Tensor,
    first_query: int,
    end_query: int,
    compress_ratio: int,
) -> None:
    """Write which compressed states the indexer scores for each prefill token.

    Args:
        state_starts: Where each request's states begin in one row of all of them,
            and where the last one's end.
        row_starts: The same, where the gathered states are laid out otherwise.
        out_request_of_state: The request of each state.
        out_first_state: First state of each query in ``[first_query, end_query)``.
        out_end_state: One past its last: those wholly below or at its position.
    """
    num_requests = len(query_start_loc) - 1
    requests, positions = _positions(query_start_loc, seq_lens, num_requests)
    wanted = slice(first_query, end_query)
    first = row_starts[requests[wanted]].long()
    end = first + (positions[wanted] + 1) // compress_ratio
    out_first_state[: len(first)] = first.to(out_first_state.dtype)
    out_end_state[: len(end)] = end.to(out_end_state.dtype)
    num_states = state_starts[: num_requests + 1].diff()
    owners = torch.repeat_interleave(torch.arange(num_requests), num_states)
    out_request_of_state[: len(owners)] = owners.to(out_request_of_state.dtype)

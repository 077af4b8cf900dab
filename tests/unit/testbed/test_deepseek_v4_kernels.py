# SPDX-License-Identifier: Apache-2.0
"""The stand-ins' arithmetic against a reference without tensors."""

import dataclasses
from itertools import accumulate

import pytest
import torch

from testbed.deepseek_v4 import kernels
from tests import deepseek_v4_reference as reference
from tests.deepseek_v4_reference import PAD, Batch

_BATCHES = [Batch.random(seed, 1 + seed % 4, 1 + 90 * (seed % 3)) for seed in range(9)]
_PADDED = dataclasses.replace(_BATCHES[5], padded_tokens=frozenset({0, 3, 7, 11}))


def _empty(size: int, *shape: int) -> torch.Tensor:
    return torch.full((size, *shape), 12345, dtype=torch.int64)


@pytest.mark.parametrize("batch", _BATCHES)
def test_each_token_is_mapped_to_its_request(batch):
    num_tokens = len(batch.tokens)
    out = _empty(num_tokens + 2)
    kernels.request_of_each_token(
        batch.query_start_loc, out, len(batch.query_lens), num_tokens, num_tokens
    )
    assert out.tolist() == [*reference.requests(batch), 12345, 12345]


def test_tokens_past_the_mapped_ones_count_as_request_0():
    out = _empty(6)
    kernels.request_of_each_token(torch.tensor([0, 2, 4]), out, 2, 4, 6)
    assert out.tolist() == [0, 0, 1, 1, 0, 0]


def test_mapped_tokens_past_the_last_request_belong_to_it():
    out = _empty(6)
    kernels.request_of_each_token(torch.tensor([0, 2, 4]), out, 2, 6, 6)
    assert out.tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("batch", [*_BATCHES, _PADDED])
@pytest.mark.parametrize(("block_size", "ratio"), [(64, 4), (2, 128)])
def test_compressed_states_go_where_their_last_token_says(batch, block_size, ratio):
    out = _empty(len(batch.tokens))
    kernels.compressed_slots(
        out,
        batch.slot_mapping,
        batch.query_start_loc,
        batch.seq_lens,
        batch.blocks,
        block_size,
        ratio,
    )
    assert out.tolist() == reference.compressed_slots(batch, block_size, ratio)


@pytest.mark.parametrize("batch", [*_BATCHES, _PADDED])
@pytest.mark.parametrize("first_token", [0, 1])
@pytest.mark.parametrize("replay", [False, True])
def test_a_window_ends_at_its_token(batch, first_token, replay):
    replay_start = [5 * n if replay else 0 for n, _ in enumerate(batch.query_lens)]
    num_tokens = len(batch.tokens) - first_token
    slots, lens = _empty(num_tokens + 1, 1, 40), _empty(num_tokens + 1)
    kernels.window_slots(
        slots,
        lens,
        40,
        batch.query_start_loc,
        batch.seq_lens,
        torch.tensor(reference.requests(batch)),
        batch.slot_mapping >= 0,
        batch.blocks,
        16,
        torch.tensor(replay_start),
        num_tokens,
        first_token,
    )
    expected = reference.window_slots(batch, 40, 16, replay_start)[first_token:]
    rows = [row + [PAD] * (40 - len(row)) for row in expected]
    assert slots[:num_tokens, 0].tolist() == rows
    assert lens.tolist() == [*map(len, expected), 12345]


@pytest.mark.parametrize("batch", _BATCHES)
@pytest.mark.parametrize("num_decodes", [0, 1])
def test_a_prefill_gathers_its_own_tokens_and_one_window(batch, num_decodes):
    num_prefills = len(batch.query_lens) - num_decodes
    out = _empty(num_prefills)
    kernels.prefill_gather_lens(
        out,
        batch.seq_lens,
        batch.query_start_loc,
        torch.zeros(len(batch.query_lens), dtype=torch.int32),
        num_prefills,
        num_decodes,
        128,
    )
    assert out.tolist() == reference.gather_lens(batch, num_decodes, 128)


@pytest.mark.parametrize("batch", _BATCHES)
def test_a_token_is_scored_against_the_states_below_it(batch):
    num_tokens = len(batch.tokens)
    wanted = slice(num_tokens // 3, num_tokens)
    owners = reference.request_of_state(batch, 4)
    num_states = [owners.count(n) for n, _ in enumerate(batch.query_lens)]
    starts = torch.tensor([0, *accumulate(num_states)])
    out_owners = _empty(len(owners))
    first, end = _empty(num_tokens - wanted.start), _empty(num_tokens - wanted.start)
    kernels.prefill_rows(
        batch.query_start_loc,
        batch.seq_lens,
        starts,
        starts,
        out_owners,
        first,
        end,
        wanted.start,
        wanted.stop,
        4,
    )
    rows = list(zip(first.tolist(), end.tolist(), strict=True))
    assert rows == reference.scored_states(batch, 4)[wanted]
    assert out_owners.tolist() == owners

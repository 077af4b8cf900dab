# SPDX-License-Identifier: Apache-2.0
"""Small layouts, and traces for them."""

import random

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    MooncakeStoreCoordinator,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.unit.plan.reference.models import ModelLayout
from tests.unit.plan.reference.trace import TRACE_BLOCK_TOKENS
from vllm.junctions.plan.prompts import Prompt, Units
from vllm.junctions.plan.trace import TraceRequest
from vllm.junctions.record.format import Layout
from vllm.junctions.record.layout import layout_of as describe_layout

_SHAPE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def small_layout(
    *groups: tuple[int, int], eagle: frozenset[int] = frozenset()
) -> ModelLayout:
    """Groups of ``(block tokens, window tokens)``; a window of 0 is full attention."""
    return ModelLayout(
        "small",
        "for tests",
        tuple(
            {
                f"layers.{index}": (
                    SlidingWindowSpec(block_size=block, sliding_window=window, **_SHAPE)
                    if window
                    else FullAttentionSpec(block_size=block, **_SHAPE)
                )
            }
            for index, (block, window) in enumerate(groups)
        ),
        eagle,
    )


SMALL_LAYOUTS = {
    "one block size": small_layout((64, 0), (64, 128)),
    "two block sizes": small_layout((128, 0), (32, 64)),
    "window longer than a block": small_layout((64, 0), (32, 300)),
    "drafter": small_layout((128, 0), (32, 64), eagle=frozenset({1})),
    "drafter among equal groups": small_layout(
        (256, 0), (64, 128), (64, 128), (16, 8), eagle=frozenset({2})
    ),
}


def layout_of(model: ModelLayout) -> Layout:
    """What a recording would say of a layout: as a real coordinator has it."""
    coordinator = MooncakeStoreCoordinator(
        model.groups,
        model.scheduler_block_tokens,
        model.hash_tokens,
        any(group.is_eagle_group for group in model.groups),
        retention_interval=0,
    )
    return describe_layout(coordinator, name=model.name, block_bytes=model.block_bytes)


def prompts_of(trace: list[TraceRequest], layout: Layout) -> list[Prompt]:
    """A trace's prompts, one after the other."""
    units = Units(TRACE_BLOCK_TOKENS, layout.grain_tokens)
    return [
        Prompt(one.input_length, units.of(one.hash_ids, one.input_length))
        for one in trace
    ]


def request(length: int, *hash_ids: int, timestamp: float = 0.0) -> TraceRequest:
    return TraceRequest(timestamp, length, 1, list(hash_ids))


def random_trace(seed: int, num_requests: int = 60) -> list[TraceRequest]:
    """Requests that go on from, part from, or repeat earlier ones."""
    rng = random.Random(seed)
    next_id = 0
    trace: list[TraceRequest] = []
    for index in range(num_requests):
        ids: list[int] = []
        if trace and rng.random() < 0.8:
            earlier = rng.choice(trace)
            if rng.random() < 0.15:
                trace.append(request(earlier.input_length, *earlier.hash_ids))
                continue
            whole = earlier.input_length // TRACE_BLOCK_TOKENS
            ids = earlier.hash_ids[: rng.randint(0, whole)]
        num_own = rng.randint(1, 4)
        ids = [*ids, *range(next_id, next_id + num_own)]
        next_id += num_own
        last = rng.choice([TRACE_BLOCK_TOKENS, rng.randint(1, TRACE_BLOCK_TOKENS)])
        length = (len(ids) - 1) * TRACE_BLOCK_TOKENS + last
        trace.append(request(length, *ids, timestamp=index))
    return trace

# SPDX-License-Identifier: Apache-2.0
"""Mamba: prefill chunks stop at junctions, since a state is kept only at their ends."""

import functools
from collections.abc import Callable
from itertools import islice
from typing import Any

from vllm.junctions.core.request import (
    shared_prefix_boundaries,
    stops_of,
    with_scalar,
)
from vllm.junctions.seams.registry import Hook

# Requests looked at: about as many as may enter in one pass.
_MOST_WAITING = 256


def _mamba_block_aligned_split(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mamba_block_aligned_split(
        self: Any, request: Any, *args: Any, **kwargs: Any
    ) -> int:
        if not shared_prefix_boundaries(request):
            return original(self, request, *args, **kwargs)
        stops = stops_of(
            request, lambda position: not _a_sibling_waits(self, request, position)
        )
        if not stops:
            return original(self, request, *args, **kwargs)
        # Each call ends the chunk at the earliest of its own stops, so the
        # smallest outcome is the earliest stop of all junctions together.
        return min(
            original(self, with_scalar(request, stop), *args, **kwargs)
            for stop in stops
        )

    return mamba_block_aligned_split


def _a_sibling_waits(scheduler: Any, request: Any, position: int) -> bool:
    """Whether a request that may enter in this pass shares a prefix.

    It hits what this request's first chunk reaches, and would hit less if the chunk
    stopped early. The last of them stops instead.

    Args:
        scheduler: vLLM's scheduler.
        request: The request whose chunk is split.
        position: Tokens of the prefix.
    """
    unit = position // scheduler.hash_block_size - 1
    if not 0 <= unit < len(request.block_hashes):
        return False
    block_hash = request.block_hashes[unit]
    # vLLM's own suites split chunks on stand-ins without a queue.
    waiting = getattr(scheduler, "waiting", ())
    return any(
        other is not request
        and unit < len(other.block_hashes)
        and other.block_hashes[unit] == block_hash
        for other in islice(waiting, _MOST_WAITING)
    )


HOOKS = (
    Hook(
        target="vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
        parameters=(
            "request",
            "num_new_tokens",
            "num_new_local_computed_tokens",
            "num_external_computed_tokens",
        ),
        why=(
            "A Mamba state can be kept only where a prefill chunk ends, and chunks "
            "end at one scalar junction."
        ),
        how="Asks the original once per stop and takes the shortest chunk.",
        remove_when="The split reads several shared-prefix boundaries.",
        guarded_by="tests/unit/core/test_mamba_chunks.py",
        replace=_mamba_block_aligned_split,
    ),
)

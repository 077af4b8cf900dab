# SPDX-License-Identifier: Apache-2.0
"""Mamba: prefill chunks stop at junctions, since a state is kept only at their ends."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.junctions.core.request import (
    shared_prefix_boundaries,
    stops_of,
    with_scalar,
)
from vllm.junctions.seams.registry import Hook


def _mamba_block_aligned_split(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mamba_block_aligned_split(
        self: Any, request: Any, *args: Any, **kwargs: Any
    ) -> int:
        if not shared_prefix_boundaries(request):
            return original(self, request, *args, **kwargs)
        # Each call ends the chunk at the earliest of its own stops, so the
        # smallest outcome is the earliest stop of all junctions together.
        return min(
            original(self, with_scalar(request, stop), *args, **kwargs)
            for stop in stops_of(request)
        )

    return mamba_block_aligned_split


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

# SPDX-License-Identifier: Apache-2.0
"""Scheduler: a Mamba prefill chunk stops at every junction."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.junctions.hooks.registry import Hook
from vllm.junctions.hooks.request import focused, shared_prefix_boundaries


def _mamba_block_aligned_split(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mamba_block_aligned_split(
        self: Any, request: Any, *args: Any, **kwargs: Any
    ) -> int:
        def split_at(junction: int) -> int:
            with focused(request, junction):
                return original(self, request, *args, **kwargs)

        # Each call ends the chunk at the earliest of its own stops, so the
        # smallest outcome is the earliest stop of all junctions together.
        return min(split_at(j) for j in shared_prefix_boundaries(request) or (0,))

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
        how="Asks the original once per junction and takes the shortest chunk.",
        remove_when="The split reads several shared-prefix boundaries.",
        guarded_by="tests/unit/hooks/test_core_scheduler.py",
        replace=_mamba_block_aligned_split,
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""The hooks into vLLM's core, as one set."""

from vllm.junctions.core import mamba_chunks, managers, request
from vllm.junctions.seams.registry import Hook, HookSet

CORE_HOOKS = HookSet(request.HOOKS + managers.HOOKS + mamba_chunks.HOOKS)

__all__ = ["CORE_HOOKS", "Hook", "HookSet"]

# SPDX-License-Identifier: Apache-2.0
"""The hooks into vLLM's core, as one set."""

from vllm.junctions.hooks import core_scheduler, managers, request
from vllm.junctions.hooks.registry import Hook, HookSet

CORE_HOOKS = HookSet(request.HOOKS + managers.HOOKS + core_scheduler.HOOKS)

__all__ = ["CORE_HOOKS", "Hook", "HookSet"]

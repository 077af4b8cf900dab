# SPDX-License-Identifier: Apache-2.0
"""Faults of stock vLLM that are mended in passing; knows nothing of junctions.

A module a fault. The hooks go on once a process, all together, and act only on the
engines that switched the repair on.
"""

from vllm.junctions.repairs import (
    endless_loads,
    late_loads,
    load_reservation,
    loads_wait,
    padding_rows,
    prompt_embeds,
    same_pass_resume,
    short_puts,
    silent_lookups,
)
from vllm.junctions.repairs.record import Repair
from vllm.junctions.seams.registry import HookSet

REPAIRS: tuple[Repair, ...] = (
    padding_rows.REPAIR,
    prompt_embeds.REPAIR,
    same_pass_resume.REPAIR,
    endless_loads.REPAIR,
    load_reservation.REPAIR,
    loads_wait.REPAIR,
    silent_lookups.REPAIR,
    late_loads.REPAIR,
    short_puts.REPAIR,
)
HOOKS = HookSet(tuple(hook for repair in REPAIRS for hook in repair.hooks))
NAMES = tuple(repair.name for repair in REPAIRS)

__all__ = ["HOOKS", "NAMES", "REPAIRS", "Repair"]

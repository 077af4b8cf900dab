# SPDX-License-Identifier: Apache-2.0
"""Engine in a box: vLLM's scheduler and the connector, driven without a model."""

# First: it sets what vLLM reads when it is imported.
from benchmarks.testbed.box import environment as _environment  # noqa: F401
from benchmarks.testbed.box.box import Box
from benchmarks.testbed.box.config import EngineOptions, Side
from benchmarks.testbed.box.engine import BoxEngine, Served, Stuck
from benchmarks.testbed.box.forward import WrongKV
from benchmarks.testbed.box.layout import Group, Layout
from benchmarks.testbed.box.memory_store import MemoryStore

__all__ = [
    "Box",
    "BoxEngine",
    "EngineOptions",
    "Group",
    "Layout",
    "MemoryStore",
    "Served",
    "Side",
    "Stuck",
    "WrongKV",
]

# SPDX-License-Identifier: Apache-2.0
"""Engine in a box: vLLM's scheduler and the connector, driven without a model."""

# First: it sets what vLLM reads when it is imported.
from testbed.box import environment as _environment  # noqa: F401
from testbed.box.box import Box
from testbed.box.config import EngineOptions, Side
from testbed.box.engine import BoxEngine, Served, Stuck
from testbed.box.forward import WrongKV
from testbed.box.layout import Group, Layout
from testbed.box.memory_store import MemoryStore
from testbed.box.neighbour import Neighbour

__all__ = [
    "Box",
    "BoxEngine",
    "EngineOptions",
    "Group",
    "Layout",
    "MemoryStore",
    "Neighbour",
    "Served",
    "Side",
    "Stuck",
    "WrongKV",
]

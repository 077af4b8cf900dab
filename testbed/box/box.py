# SPDX-License-Identifier: Apache-2.0
"""Several instances that share one store, and what must hold of it."""

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from testbed.box.config import EngineOptions, Side
from testbed.box.engine import BoxEngine
from testbed.box.fingerprints import FingerprintBook
from testbed.box.layout import Layout
from testbed.box.memory_store import MemoryStore


class Box:
    """A store and the instances that use it; ``with`` ends them all.

    Attributes:
        store: The shared store, in memory; idle when ``mooncake_config`` names the
            client configuration of a real one.
        engines: The instances, in the order in which they were added.
    """

    def __init__(
        self,
        layout: Layout,
        options: EngineOptions | None = None,
        mooncake_config: Path | None = None,
    ) -> None:
        self.layout = layout
        self.options = options or EngineOptions()
        self.store = MemoryStore()
        self._mooncake_config = mooncake_config
        self.book = FingerprintBook(layout)
        self.engines: list[BoxEngine] = []
        self._checked: set[str] = set()

    def engine(self, side: Side | None = None, **changes: Any) -> BoxEngine:
        """Add an instance; ``changes`` are made to the box's options."""
        if side is not None:
            changes["side"] = side
        options = replace(self.options, **changes)
        name = f"engine-{len(self.engines)}"
        engine = BoxEngine(
            self.layout, self._mooncake_config or self.store, self.book, options, name
        )
        self.engines.append(engine)
        return engine

    def faults(self) -> list[str]:
        """Return what is wrong in the store; each value is looked at once."""
        found = []
        for key, value in list(self.store.values.items()):
            if key not in self._checked:
                self._checked.add(key)
                fault = self.book.fault(key, value)
                if fault is not None:
                    found.append(fault)
        return found

    def stored(self) -> set[tuple[int, int, str]]:
        """Return ``(group id, prefix tokens, key)`` of everything ever stored."""
        return {
            (
                int(key.rpartition("@group:")[2].partition("@")[0]),
                self.book.prefix_tokens(key),
                key,
            )
            for _, key in self.store.puts
        }

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.engines.clear()

    def __enter__(self) -> "Box":
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

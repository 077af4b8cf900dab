# SPDX-License-Identifier: Apache-2.0
"""Let stock constructors build our subclasses.

The stock connector names its scheduler, worker, coordinator and threads as globals
of its modules; there is no parameter to pass others in. While such a constructor
runs, the global points at our subclass.
"""

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.RLock()


@contextmanager
def substituted(module_name: str, **replacements: Any) -> Iterator[None]:
    """Point globals of a module at other objects for the length of a block.

    Args:
        module_name: Module whose globals are meant.
        replacements: New object by global name; each name must exist.
    """
    module = importlib.import_module(module_name)
    with _LOCK:
        originals = {name: getattr(module, name) for name in replacements}
        for name, replacement in replacements.items():
            setattr(module, name, replacement)
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(module, name, original)

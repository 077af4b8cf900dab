# SPDX-License-Identifier: Apache-2.0
"""Let stock constructors build our subclasses, for one block or for good.

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
# Set on a module whose globals were rebound for good.
_REBOUND = "_vllm_junctions_rebound"


@contextmanager
def substituted(module_name: str, **replacements: Any) -> Iterator[None]:
    """Point globals of a module at other objects for the length of a block.

    Does nothing on a module that went through :func:`rebind`: what its globals name
    by now is what the last one who set them wants, a test's stand-in for example.

    Args:
        module_name: Module whose globals are meant.
        replacements: New object by global name; each name must exist.
    """
    module = importlib.import_module(module_name)
    if getattr(module, _REBOUND, False):
        yield
        return
    with _LOCK:
        originals = {name: getattr(module, name) for name in replacements}
        for name, replacement in replacements.items():
            setattr(module, name, replacement)
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(module, name, original)


def rebind(module_name: str, **replacements: Any) -> None:
    """Point globals of a module at other objects for the rest of the process.

    Args:
        module_name: Module whose globals are meant.
        replacements: New object by global name; names that the module does not
            have are left out.
    """
    module = importlib.import_module(module_name)
    with _LOCK:
        for name, replacement in replacements.items():
            if hasattr(module, name):
                setattr(module, name, replacement)
        setattr(module, _REBOUND, True)

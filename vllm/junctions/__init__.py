# SPDX-License-Identifier: Apache-2.0
"""Shared-prefix junctions for vLLM's Mooncake store.

Installed, it needs no code: vLLM loads the plugin, and a server that selects
``MooncakeStoreConnector`` gets junctions. :func:`enable` is for tests.
"""

from vllm.junctions.errors import (
    ConfigurationError,
    JunctionsError,
    UnsupportedRuntimeError,
)
from vllm.junctions.version import __version__

__all__ = [
    "ConfigurationError",
    "JunctionsError",
    "UnsupportedRuntimeError",
    "__version__",
    "enable",
]


def enable() -> None:
    """Apply everything in this process, whichever connector an engine selects.

    For tests, and for running vLLM's own suites against the hooks: the core hooks
    go on for every engine of the process, and the Mooncake store modules name our
    classes. A server needs none of this.

    Raises:
        UnsupportedRuntimeError: The running vLLM is not supported; nothing was
            applied.
    """
    from vllm.junctions.everywhere import apply

    apply()

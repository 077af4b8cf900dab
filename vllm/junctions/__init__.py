# SPDX-License-Identifier: Apache-2.0
"""Shared-prefix junctions for vLLM's Mooncake store.

Installed, it needs no code: vLLM loads the plugin, and a server that selects
``MooncakeStoreConnector`` gets junctions.
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
]

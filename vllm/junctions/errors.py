# SPDX-License-Identifier: Apache-2.0
"""The errors that a user of this package can meet."""


class JunctionsError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(JunctionsError):
    """A setting in ``kv_connector_extra_config`` cannot be used as given."""


class UnsupportedRuntimeError(JunctionsError):
    """The running vLLM is not one that the hooks were written for."""

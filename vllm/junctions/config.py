# SPDX-License-Identifier: Apache-2.0
"""Settings of this package, read from ``kv_connector_extra_config``."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from vllm.junctions.errors import ConfigurationError

# Every key that begins with this belongs to us; the rest is Mooncake's.
KEY_PREFIX = "junction"
_LONGEST_TIMEOUT_MS = 3_600_000


class JunctionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user can set.

    Attributes:
        junctions: Whether store lookups report junctions and tails are kept there.
            False gives stock behaviour: the stock connector, no hooks.
        junctions_lookup_timeout_ms: How long the scheduler waits for the answer to
            a store lookup, in milliseconds; then the lookup counts as no hit. A
            lookup of a long prompt takes tens of milliseconds.
    """

    junctions: bool = True
    junctions_lookup_timeout_ms: Annotated[
        int, msgspec.Meta(ge=1, le=_LONGEST_TIMEOUT_MS)
    ] = 2_000

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> "JunctionsConfig":
        """Read our keys from a connector's ``kv_connector_extra_config``.

        Args:
            extra_config: The mapping as the user gave it. Keys that do not begin
                with ``junction`` are left to the stock connector.

        Raises:
            ConfigurationError: One of our keys is unknown or has a wrong type.
        """
        ours = {
            key: value
            for key, value in extra_config.items()
            if isinstance(key, str) and key.startswith(KEY_PREFIX)
        }
        for key, value in ours.items():
            field = _FIELD_TYPES.get(key)
            if field is None:
                raise ConfigurationError(
                    f"Unknown key {key!r} (value {value!r}) in "
                    f"kv_connector_extra_config. Accepted: {_accepted()}."
                )
            try:
                msgspec.convert(value, field, strict=True)
            except (msgspec.ValidationError, UnicodeError) as error:
                raise ConfigurationError(
                    f"Invalid value {value!r} for {key!r} in "
                    f"kv_connector_extra_config ({error}). Accepted: {_accepted()}."
                ) from error
        return msgspec.convert(ours, cls, strict=True)


_FIELD_TYPES: Mapping[str, Any] = {
    field.name: field.type for field in msgspec.structs.fields(JunctionsConfig)
}


_VALUES = {
    "junctions": "true or false",
    "junctions_lookup_timeout_ms": f"1 to {_LONGEST_TIMEOUT_MS}",
}


def _accepted() -> str:
    return ", ".join(
        f'"{field.name}": {_VALUES[field.name]} '
        f"(default {msgspec.json.encode(field.default).decode()})"
        for field in msgspec.structs.fields(JunctionsConfig)
    )

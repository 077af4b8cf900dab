# SPDX-License-Identifier: Apache-2.0
"""Settings of this package, read from ``kv_connector_extra_config``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from vllm.junctions.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Every key that begins with this belongs to us; the rest is Mooncake's.
KEY_PREFIX = "junction"
# By name, so that settings can be read without importing what they switch on.
REPAIR_NAMES = (
    "padding_rows",
    "prompt_embeds",
    "same_pass_resume",
    "endless_loads",
    "load_reservation",
    "loads_wait",
    "silent_lookups",
    "late_loads",
    "short_puts",
)
_LONGEST_TIMEOUT_MS = 3_600_000
MAX_PREDICTED_TAILS = 4


class JunctionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user can set.

    Attributes:
        junctions: Whether store lookups report junctions and tails are kept there.
            False gives stock behaviour: the stock connector, no hooks.
        junctions_lookup: How the store is asked: ``two_phase`` asks only for keys
            that could matter, ``at_once`` makes stock's own single query.
        junctions_repairs: Faults of stock to mend: all (True), none (False), or a
            list of names.
        junctions_lookup_timeout_ms: How long the scheduler waits for the answer to
            a store lookup, in milliseconds; then the lookup counts as no hit. A
            lookup of a long prompt takes tens of milliseconds.
        junctions_predict: Most tails of a prompt that are placed where its first
            sibling is expected to part, as lookups taught; 0 places none.
        junctions_record: A file to record traffic to, without its text; None: none.
            Works with ``junctions`` off too. See :mod:`vllm.junctions.record`.
        junctions_record_secret: What instances of one store share so that their
            recordings can be planned together; None: a random one for each.
    """

    junctions: bool = True
    junctions_lookup: Literal["two_phase", "at_once"] = "two_phase"
    junctions_repairs: bool | tuple[str, ...] = True
    junctions_lookup_timeout_ms: Annotated[
        int, msgspec.Meta(ge=1, le=_LONGEST_TIMEOUT_MS)
    ] = 2_000
    junctions_predict: Annotated[int, msgspec.Meta(ge=0, le=MAX_PREDICTED_TAILS)] = 0
    junctions_record: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    junctions_record_secret: Annotated[str, msgspec.Meta(min_length=8)] | None = None

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> "JunctionsConfig":
        """Read our keys from the transfer configuration of an engine that has one.

        Raises:
            ConfigurationError: See :meth:`from_extra_config`.
        """
        assert vllm_config.kv_transfer_config is not None
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        return cls.from_extra_config(extra_config)

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
        config = msgspec.convert(ours, cls, strict=True)
        config.repairs()
        return config

    def repairs(self) -> tuple[str, ...]:
        """Return the names of the repairs that are on.

        Raises:
            ConfigurationError: ``junctions_repairs`` names one that does not exist.
        """
        wanted = self.junctions_repairs
        if isinstance(wanted, bool):
            return REPAIR_NAMES if wanted else ()
        for name in wanted:
            if name not in REPAIR_NAMES:
                raise ConfigurationError(
                    f"Unknown repair {name!r} in 'junctions_repairs' of "
                    f"kv_connector_extra_config. Known: {', '.join(REPAIR_NAMES)}."
                )
        return wanted


_FIELD_TYPES: Mapping[str, Any] = {
    field.name: field.type for field in msgspec.structs.fields(JunctionsConfig)
}


_VALUES = {
    "junctions": "true or false",
    "junctions_lookup": '"two_phase" or "at_once"',
    "junctions_repairs": "true, false or a list of names",
    "junctions_lookup_timeout_ms": f"1 to {_LONGEST_TIMEOUT_MS}",
    "junctions_predict": f"0 to {MAX_PREDICTED_TAILS}",
    "junctions_record": "a file to record traffic to, or null",
    "junctions_record_secret": "8 characters or more, or null",
}


def _accepted() -> str:
    return ", ".join(
        f'"{field.name}": {_VALUES[field.name]} '
        f"(default {msgspec.json.encode(field.default).decode()})"
        for field in msgspec.structs.fields(JunctionsConfig)
    )

# SPDX-License-Identifier: Apache-2.0
"""Counters of what junctions did and of what was refused."""

from dataclasses import dataclass, fields

from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass
class JunctionCounters:
    """Counts since the engine started, one object per connector role.

    Attributes:
        store_junctions: Junctions that store lookups reported and that were merged.
        dropped_entries: Junction entries that were 0 or past the request.
        malformed_payloads: Lookup answers that could not be used; each cost a hit.
        failed_lookups: Lookups that raised on the worker; each cost a hit.
        timed_out_lookups: Lookups that were not answered in time, or not sent behind
            one that was not; each cost a hit.
        failed_loads: Loads of a hit that the store did not deliver.
    """

    store_junctions: int = 0
    dropped_entries: int = 0
    malformed_payloads: int = 0
    failed_lookups: int = 0
    timed_out_lookups: int = 0
    failed_loads: int = 0

    def add_fault(self, name: str, message: str, count: int = 1) -> None:
        """Count a fault and log it the first time it happens.

        Args:
            name: The counter to raise, one of this class's fields.
            message: What happened, in words an operator can act on.
            count: How many to add.
        """
        before = getattr(self, name)
        setattr(self, name, before + count)
        if before == 0:
            logger.warning("%s Further cases are only counted (%s).", message, name)

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

# SPDX-License-Identifier: Apache-2.0
"""What a metric is."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One metric of ``/metrics``.

    Attributes:
        name: Its full name, as Prometheus shows it.
        kind: Prometheus' type.
        meaning: Help text; says the unit.
        labels: Labels beside those that all of vLLM's metrics have.
        known_values: Values of ``labels`` to show as 0 before anything happened.
        buckets: Upper bounds of a histogram's buckets, all above 0.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    known_values: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()

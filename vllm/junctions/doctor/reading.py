# SPDX-License-Identifier: Apache-2.0
"""A running server's ``/metrics``, read over HTTP."""

import urllib.error
import urllib.request
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from vllm.junctions.metrics.counted import INFO, LOOKUPS

_SECONDS = 10.0


@dataclass
class ServerMetrics:
    """What a server has counted since it started.

    Attributes:
        base_url: Where it listens.
        samples: Metric name, then labels and value of each sample.
    """

    base_url: str
    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, base_url: str, text: str) -> "ServerMetrics":
        """Read the text of ``/metrics``."""
        metrics = cls(base_url)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found = metrics.samples.setdefault(sample.name, [])
                found.append((sample.labels, sample.value))
        return metrics

    def total(self, name: str, **labels: str) -> float:
        """Sum the samples of a metric that have these labels."""
        return sum(
            value
            for found, value in self.samples.get(name, [])
            if labels.items() <= found.items()
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric, summed by one of its labels."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, []):
            sums[labels[label]] = sums.get(labels[label], 0) + value
        return sums

    @property
    def info(self) -> dict[str, str]:
        """Labels of the information metric; empty before the first request."""
        samples = self.samples.get(INFO.name)
        return samples[-1][0] if samples else {}

    @property
    def model_name(self) -> str:
        """The model that the server says it serves.

        Raises:
            ValueError: If none of its metrics has one.
        """
        for samples in self.samples.values():
            for labels, _ in samples:
                if "model_name" in labels:
                    return labels["model_name"]
        raise ValueError(f"{self.base_url} names no model in its metrics")

    @property
    def has_junctions(self) -> bool:
        """Whether the server shows the metrics of junctions."""
        return LOOKUPS.name in self.samples


class NoHttpAddressError(ValueError):
    """A server's address does not say that it is one of HTTP."""


def get(url: str, body: bytes | None = None) -> str:
    """Return what a URL answers to a GET, or with a body to a POST.

    Raises:
        NoHttpAddressError: If ``url`` is none of HTTP.
        ValueError: If the answer is an error.
        OSError: If nothing answers.
    """
    if not url.startswith(("http://", "https://")):
        raise NoHttpAddressError("is no http address")
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answers {error.code}") from error

# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard: Grafana's own types take it, and every metric exists."""

import json
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.support import vllm_config
from tools import dashboard
from vllm.junctions.metrics.counted import METRICS
from vllm.junctions.overlay import plugin

_BOARD: dict[str, Any] = json.loads(dashboard.PATH.read_text())
_PANELS = [panel for panel in _BOARD["panels"] if panel["type"] != "row"]
# What Grafana puts in for its variables before Prometheus sees a query.
_VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}


def _queries() -> list[str]:
    return [target["expr"] for panel in _PANELS for target in panel["targets"]]


def _selectors(node: Any) -> Iterator[Any]:
    """Yield every selector of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str):
            yield from _selectors(child)
    for argument in getattr(node, "args", None) or ():
        yield from _selectors(argument)


def _parsed(query: str) -> Any:
    for variable, value in _VARIABLES.items():
        query = query.replace(variable, value)
    return promql_parser.parse(query)


@pytest.fixture
def exported(tmp_path) -> Iterator[dict[str, set[str]]]:
    """Labels by sample name, as a server of this vLLM registers them."""
    plugin.register()
    unregister_vllm_metrics()
    PrometheusStatLogger(vllm_config(tmp_path))
    names: dict[str, set[str]] = {}
    for collector in list(REGISTRY._collector_to_names):
        for name in REGISTRY._collector_to_names[collector]:
            names[name] = set(getattr(collector, "_labelnames", ()))
    yield names
    unregister_vllm_metrics()


def test_the_file_is_what_the_builders_make():
    assert dashboard.PATH.read_text() == dashboard.build()


def test_grafanas_types_know_every_key_and_value_of_it():
    """What they do not know is lost on the way through them."""
    register_default_plugins()
    through = JSONEncoder(sort_keys=True).encode(Dashboard.from_json(_BOARD))
    assert json.loads(through) == _BOARD


def test_every_panel_says_what_it_shows_and_lies_on_the_grid():
    taken: set[tuple[int, int]] = set()
    for panel in _PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells


def test_every_metric_and_label_of_it_exists(exported):
    queries = _queries()
    assert len(queries) > 10
    for query in queries:
        selectors = list(_selectors(_parsed(query)))
        assert len(selectors) == query.count("vllm:")
        for selector in selectors:
            labels = exported.get(selector.name)
            assert labels is not None, f"{selector.name} is not exported"
            used = {matcher.name for matcher in selector.matchers.matchers}
            assert used <= labels, (selector.name, used, labels)


def test_labels_that_queries_group_by_exist(exported):
    for query in _queries():
        parsed = _parsed(query)
        by = set(parsed.modifier.labels) if getattr(parsed, "modifier", None) else set()
        for selector in _selectors(parsed):
            if isinstance(parsed, promql_parser.AggregateExpr):
                assert by - {"le"} <= exported[selector.name]


def test_every_metric_of_ours_but_the_price_of_none_is_shown(exported):
    shown = " ".join(_queries())
    missing = [metric.name for metric in METRICS if metric.name not in shown]
    assert missing == []

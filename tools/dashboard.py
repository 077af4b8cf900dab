# SPDX-License-Identifier: Apache-2.0
"""Writes ``dashboards/junctions.json`` with Grafana's own typed builders.

Usage: ``python -m tools.dashboard`` (``make dashboard``). Needs the distribution
``grafana-foundation-sdk``; the JSON that it writes needs nothing but Grafana.
"""

from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef

PATH = Path(__file__).parent.parent / "dashboards" / "junctions.json"

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WHERE = 'model_name=~"$model"'


class Query(NamedTuple):
    """A PromQL expression and how its lines are called."""

    expression: str
    legend: str


class Chart(NamedTuple):
    """One panel."""

    title: str
    meaning: str
    unit: str
    queries: tuple[Query, ...]
    is_stacked: bool = False


def _rate(metric: str, more: str = "") -> str:
    return f"rate(vllm:{metric}{{{_WHERE}{more}}}[$__rate_interval])"


def _sum(metric: str, by: str = "", more: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({_rate(metric, more)})"


def _quantile(quantile: float, metric: str, by: str = "le") -> str:
    return f"histogram_quantile({quantile}, {_sum(f'{metric}_bucket', by)})"


ROWS: dict[str, tuple[Chart, ...]] = {
    "Do siblings hit?": (
        Chart(
            "Tokens from the store",
            "Share of the tokens that were asked of the store and came from it.",
            "percentunit",
            (
                Query(
                    f"{_sum('external_prefix_cache_hits_total')} / "
                    f"{_sum('external_prefix_cache_queries_total')}",
                    "store hit rate",
                ),
                Query(
                    f"{_sum('prefix_cache_hits_total')} / "
                    f"{_sum('prefix_cache_queries_total')}",
                    "local hit rate",
                ),
            ),
        ),
        Chart(
            "Lookups by outcome",
            "nothing_stored: nobody saved it, or under another hash root. "
            "tail_missing: saved, but some group has no tail there yet.",
            "ops",
            (Query(_sum("junctions_lookups_total", "outcome"), "{{outcome}}"),),
            is_stacked=True,
        ),
        Chart(
            "Junctions found",
            "Where siblings part, by the lookup that saw it, or by who said so before.",
            "ops",
            (Query(_sum("junctions_found_total", "source"), "{{source}}"),),
        ),
    ),
    "Do first siblings hit?": (
        Chart(
            "First siblings served",
            "Requests that were the first to hit a declared or predicted tail.",
            "ops",
            (Query(_sum("junctions_first_siblings_total", "source"), "{{source}}"),),
            is_stacked=True,
        ),
        Chart(
            "What that saved and cost",
            "Tokens that first siblings did not compute, and bytes put for all tails "
            "that were declared or predicted.",
            "short",
            (
                Query(
                    _sum("junctions_first_sibling_tokens_total", "source"),
                    "tokens saved, {{source}}",
                ),
                Query(
                    _sum("junctions_extra_tail_bytes_saved_total", "source"),
                    "bytes put, {{source}}",
                ),
            ),
        ),
        Chart(
            "Declared positions ignored",
            "What clients declared that cannot be a position, by reason.",
            "ops",
            (Query(_sum("junctions_declared_ignored_total", "reason"), "{{reason}}"),),
        ),
        Chart(
            "Marks on chat messages",
            "taken: became a declared position. Otherwise why not.",
            "ops",
            (Query(_sum("junctions_marks_total", "outcome"), "{{outcome}}"),),
        ),
    ),
    "What is lost to a lagging group?": (
        Chart(
            "Tokens lost, by group",
            "Tokens a second that some group has and the joint hit does not reach, by "
            "the group that lags.",
            "short",
            (Query(_sum("junctions_lost_tokens_sum", "group"), "{{group}}"),),
            is_stacked=True,
        ),
        Chart(
            "Tokens lost per lookup",
            "Of the lookups that found anything.",
            "short",
            (
                Query(_quantile(0.5, "junctions_lost_tokens"), "median"),
                Query(_quantile(0.95, "junctions_lost_tokens"), "95 %"),
            ),
        ),
    ),
    "What do junctions cost?": (
        Chart(
            "Bytes saved, by cause",
            "What is put into the store because of a junction, and everything else.",
            "Bps",
            (
                Query(_sum("junctions_tail_bytes_saved_total"), "junction tails"),
                Query(
                    _sum(
                        "mooncake_store_operation_bytes_total",
                        more=',operation="save_put"',
                    )
                    + f" - {_sum('junctions_tail_bytes_saved_total')}",
                    "everything else",
                ),
            ),
            is_stacked=True,
        ),
        Chart(
            "Junction tail blocks",
            "Saved, and skipped because the block was gone when the save was due.",
            "ops",
            (
                Query(_sum("junctions_tail_blocks_saved_total"), "saved"),
                Query(_sum("junctions_tail_blocks_skipped_total"), "gone"),
            ),
        ),
    ),
    "What does a lookup cost, and what goes wrong?": (
        Chart(
            "Keys and calls per lookup",
            "95 in 100 lookups ask for no more.",
            "short",
            (
                Query(_quantile(0.95, "junctions_lookup_keys"), "keys"),
                Query(_quantile(0.95, "junctions_lookup_rpcs"), "calls"),
            ),
        ),
        Chart(
            "Time of existence checks",
            "As vLLM measures it, on the lookup thread.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({quantile}, "
                    + _sum(
                        "mooncake_store_operation_time_seconds_bucket",
                        "le",
                        ',operation="lookup_exists"',
                    )
                    + ")",
                    name,
                )
                for quantile, name in ((0.5, "median"), (0.99, "99 %"))
            ),
        ),
        Chart(
            "Faults",
            "Each cost no more than hits; the first of a kind is in the log.",
            "ops",
            (Query(_sum("junctions_faults_total", "kind"), "{{kind}}"),),
        ),
        Chart(
            "Hash roots",
            "Instances by hash root. More than one line: those instances never hit "
            "each other's keys.",
            "short",
            (
                Query(
                    f"count by (hash_root) (vllm:junctions_info{{{_WHERE}}})",
                    "{{hash_root}}",
                ),
            ),
        ),
    ),
}


def _panel(chart: Chart, width: int) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel = (
        timeseries.Panel()
        .title(chart.title)
        .description(chart.meaning)
        .unit(chart.unit)
        .min(0)
        .height(8)
        .span(width)
        .legend(legend)
        .fill_opacity(25 if chart.is_stacked else 0)
        .datasource(_SOURCE)
    )
    if chart.is_stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for index, query in enumerate(chart.queries):
        panel.with_target(
            prometheus.Dataquery()
            .datasource(_SOURCE)
            .expr(query.expression)
            .legend_format(query.legend)
            .ref_id("ABCDEFG"[index])
        )
    return panel


def build() -> str:
    """Return the dashboard as JSON text."""
    board = (
        dashboard.Dashboard("vLLM junctions")
        .uid("vllm-junctions")
        .description("Shared-prefix junctions of vLLM's Mooncake store.")
        .tags(["vllm", "mooncake"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(
            dashboard.DatasourceVariable("datasource")
            .label("Prometheus")
            .type("prometheus")
        )
        .with_variable(
            dashboard.QueryVariable("model")
            .label("Model")
            .datasource(_SOURCE)
            .query("label_values(vllm:junctions_lookups_total, model_name)")
            .include_all(True)
            .multi(True)
        )
    )
    for title, charts in ROWS.items():
        board.with_row(dashboard.Row(title))
        for chart in charts:
            board.with_panel(_panel(chart, 24 // len(charts)))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def main() -> None:
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(build())


if __name__ == "__main__":
    main()

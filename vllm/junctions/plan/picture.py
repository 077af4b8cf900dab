# SPDX-License-Identifier: Apache-2.0
"""The picture of a replay: hit share against bytes share, a point per policy."""

from pathlib import Path
from typing import Any

from vllm.junctions.plan.advice import percent
from vllm.junctions.plan.figures import PlanReport
from vllm.junctions.plan.policies import CEILING, DENSE, JUNCTIONS, STOCK
from vllm.junctions.plan.text import describe

_COLOURS = {STOCK: "#c0392b", JUNCTIONS: "#1e8449", DENSE: "#2c3e50"}
_INTERVAL_COLOUR = "#7f8c8d"
_JUNCTION_INTERVAL_COLOUR = "#76b041"
_PREDICTED_COLOUR = "#2471a3"
_MARKERS = "osD^vP*X<>"


class NoPicture(Exception):
    """There is none to draw; the message says why."""


def write_picture(report: PlanReport, path: Path) -> None:
    """Draw a report.

    Raises:
        NoPicture: There is nothing to compare, or nothing to draw with.
    """
    points = {
        name: (figures.bytes_share_of_dense, figures.hit_share_of_ceiling)
        for name, figures in report.policies.items()
        if figures.bytes_share_of_dense and figures.hit_share_of_ceiling is not None
    }
    if len(points) < 2:
        raise NoPicture("no two prompts of this trace share a prefix.")
    try:
        import matplotlib
    except ImportError:
        raise NoPicture("that needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5.4), layout="constrained")
    least_bytes, _ = points.pop(CEILING)
    _draw_bounds(axes, least_bytes)
    _draw_points(axes, points, report.advice.policy if report.advice else None)
    _label_axes(axes, report)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_bounds(axes: Any, least_bytes: float) -> None:
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.text(
        0.99,
        1.015,
        "ceiling: whatever full attention could reuse",
        transform=axes.get_yaxis_transform(),
        ha="right",
        fontsize=9,
    )
    axes.axvline(least_bytes, color="black", linestyle=":", linewidth=1)
    axes.text(
        least_bytes * 0.96,
        0.02,
        "full-attention blocks alone",
        transform=axes.get_xaxis_transform(),
        rotation=90,
        ha="right",
        fontsize=9,
    )


def _draw_points(
    axes: Any, points: dict[str, tuple[float, float]], chosen: str | None
) -> None:
    """Draw a point per policy, and say beside the picture which is which.

    Points of policies that make no difference on a trace lie on one another, so that
    labels in the picture would too.
    """
    _join_intervals(axes, points)
    seen: dict[str, int] = {}
    for name, (bytes_share, hit_share) in points.items():
        colour = _colour(name)
        seen[colour] = seen.get(colour, -1) + 1
        axes.scatter(
            bytes_share,
            hit_share,
            s=70,
            marker=_MARKERS[seen[colour] % len(_MARKERS)],
            color=colour,
            zorder=4 if name in _COLOURS else 3,
            label=f"{name}: {percent(hit_share)} for {percent(bytes_share)}",
        )
    if chosen in points:
        axes.scatter(
            *points[chosen],
            s=260,
            facecolors="none",
            edgecolors="black",
            zorder=5,
            label=f"to be used here: {chosen}",
        )
    axes.legend(
        title="hits for bytes",
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        fontsize=9,
    )


def _join_intervals(axes: Any, points: dict[str, tuple[float, float]]) -> None:
    for start in ("every-", f"{JUNCTIONS}+every-"):
        line = sorted(place for name, place in points.items() if name.startswith(start))
        if line:
            axes.plot(*zip(*line, points[DENSE], strict=True), color=_colour(start))


def _colour(name: str) -> str:
    if name.startswith(f"{JUNCTIONS}+predict"):
        return _PREDICTED_COLOUR
    if name.startswith(f"{JUNCTIONS}+"):
        return _JUNCTION_INTERVAL_COLOUR
    return _COLOURS.get(name, _INTERVAL_COLOUR)


def _label_axes(axes: Any, report: PlanReport) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_xscale("log")
    left, _ = axes.get_xlim()
    axes.set_xlim(left / 2, 1.9)
    axes.set_ylim(0, 1.08)
    axes.set_xticks([0.05, 0.1, 0.2, 0.5, 1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("bytes stored, as a share of dense retention (log scale)")
    axes.set_ylabel("prompt tokens hit, as a share of the ceiling")
    axes.set_title(describe(report), fontsize=10)
    axes.grid(alpha=0.25)

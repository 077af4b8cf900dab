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
_PREDICTED = f"{JUNCTIONS}+predict-1"
_COLOURS[_PREDICTED] = "#2471a3"
# Where a point's label goes, in points of the page, and how it is aligned. Ours and a
# fixed interval can meet, so they lie on different sides.
_LABEL_PLACES = {
    STOCK: (10, -6, "left"),
    JUNCTIONS: (10, -20, "left"),
    DENSE: (0, -30, "center"),
    _PREDICTED: (-10, 0, "right"),
}
_LOW_INTERVAL_PLACE = (-10, 2, "right")
_HIGH_INTERVAL_PLACE = (4, -30, "left")


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
        if _is_drawn(name)
        and figures.bytes_share_of_dense
        and figures.hit_share_of_ceiling is not None
    }
    if len(points) < 2:
        raise NoPicture("no two prompts of this trace share a prefix.")
    try:
        import matplotlib
    except ImportError:
        raise NoPicture("that needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.4), layout="constrained")
    least_bytes, _ = points.pop(CEILING)
    _draw_bounds(axes, least_bytes)
    _draw_points(axes, points)
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


def _draw_points(axes: Any, points: dict[str, tuple[float, float]]) -> None:
    intervals = sorted(place for name, place in points.items() if _is_interval(name))
    axes.plot(
        *zip(*intervals, points[DENSE], strict=True),
        color=_INTERVAL_COLOUR,
        linewidth=1,
    )
    for name, (bytes_share, hit_share) in points.items():
        colour = _COLOURS.get(name, _INTERVAL_COLOUR)
        order = 4 if name == JUNCTIONS else 3
        axes.scatter(bytes_share, hit_share, s=70, color=colour, zorder=order)
        right, up, align = _label_place(name, hit_share)
        axes.annotate(
            f"{name}\n{hit_share:.0%} for {percent(bytes_share)}",
            (bytes_share, hit_share),
            xytext=(right, up),
            textcoords="offset points",
            ha=align,
            color=colour,
            fontsize=9,
            fontweight="bold" if name == JUNCTIONS else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _label_place(name: str, hit_share: float) -> tuple[int, int, str]:
    if not _is_interval(name):
        return _LABEL_PLACES[name]
    return _HIGH_INTERVAL_PLACE if hit_share > 0.9 else _LOW_INTERVAL_PLACE


def _is_drawn(name: str) -> bool:
    """Of what goes on top of junctions the first is enough: they lie close."""
    return not name.startswith(f"{JUNCTIONS}+") or name == _PREDICTED


def _is_interval(name: str) -> bool:
    return name not in _COLOURS


def _label_axes(axes: Any, report: PlanReport) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_xscale("log")
    left, _ = axes.get_xlim()
    axes.set_xlim(left / 2, 1.9)
    axes.set_ylim(0, 1.08)
    axes.set_xticks([0.05, 0.1, 0.2, 0.5, 1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("bytes stored, as a share of dense retention (log scale)")
    axes.set_ylabel("prompt tokens hit, as a share of the ceiling")
    axes.set_title(describe(report), fontsize=10)
    axes.grid(alpha=0.25)

# SPDX-License-Identifier: Apache-2.0
"""The picture of a report: what each question hit, and how long it took."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.gsm8k.report import ArmReport, Report

# Told apart by shape too, for those who see no colours.
_STYLES = {
    "none": ("#7f7f7f", "x", ":"),
    "stock": ("#d55e00", "s", "--"),
    "junctions": ("#0072b2", "o", "-"),
    "local": ("#009e73", "^", "-."),
}
_OTHER_STYLE = ("#000000", "d", "-")


def draw(report: Report, path: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    hits, times = figure.subplots(1, 2)
    for name, arm in report.arms.items():
        _draw_hits(hits, name, arm)
        _draw_times(times, name, arm)
    settings = next(iter(report.arms.values())).settings
    hits.set(
        xlabel="question",
        ylabel="tokens",
        title="Tokens loaded from the store, question by question",
    )
    hits.set_ylim(bottom=-0.03 * max(hits.get_ylim()[1], 1))
    hits.legend(loc="center right")
    times.set(
        xlabel="time to first token, s",
        ylabel="share of questions",
        title="Time to first token: share of questions up to it",
        ylim=(0, 1.02),
    )
    times.set_xlim(left=0)
    times.grid(alpha=0.3)
    if times.lines:
        times.legend(loc="lower right")
    figure.suptitle(
        f"GSM8K, {settings.shots} shots ({settings.prefix_tokens} tokens shared), "
        f"{settings.model}, {settings.dtype.removeprefix('torch.')}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_hits(axes: Axes, name: str, arm: ArmReport) -> None:
    colour, marker, _ = _STYLES.get(name, _OTHER_STYLE)
    known = [a for a in arm.answers if a.store_hit_tokens is not None]
    prompts = [a.prompt_tokens for a in known]
    if not axes.lines and prompts:
        axes.plot(
            [a.index + 1 for a in known],
            prompts,
            color="#bbbbbb",
            linewidth=1,
            label="whole prompt",
        )
    hit = "unknown" if arm.questions_hit is None else arm.questions_hit
    axes.plot(
        [a.index + 1 for a in known],
        [a.store_hit_tokens for a in known],
        color=colour,
        marker=marker,
        markersize=5 if marker == "s" else 3,
        # Hollow, so that arms that hit alike show beneath each other.
        markerfacecolor="none",
        linestyle="none",
        label=f"{name}: {hit} of {arm.questions} questions hit",
    )


def _draw_times(axes: Axes, name: str, arm: ArmReport) -> None:
    if not arm.answers:
        return
    colour, _, line = _STYLES.get(name, _OTHER_STYLE)
    axes.ecdf(
        [answer.ttft_seconds for answer in arm.answers],
        color=colour,
        linestyle=line,
        label=f"{name}: median {arm.ttft_seconds.p50:.2f} s",
    )

# SPDX-License-Identifier: Apache-2.0
"""A plan on a terminal: a table, and a bar while it is made."""

import sys
import time
from collections.abc import Iterator
from typing import TextIO

from vllm.junctions.plan.advice import percent, size_unit
from vllm.junctions.plan.figures import PlanReport

_HEADS = (
    *("policy", "hit", "of ceiling", "from store", "zero hits", "puts"),
    *("tails of dense", "{} put", "of dense"),
)
_BAR_WIDTH = 30
# Of all prompt tokens: a difference that says that the replay is of something else.
_LARGE_SHARE = 0.02
_BAR_SECONDS = 0.2


def describe(report: PlanReport) -> str:
    """Say in words what was replayed on what."""
    trace, setup = report.trace, report.setup
    instances = "1 instance"
    if setup.instances > 1:
        instances = f"{setup.instances} instances ({setup.router})"
        if setup.instances == trace.files:
            instances = f"{setup.instances} instances, a file each"
    local = "no local cache"
    if setup.local_blocks:
        local = f"{setup.local_blocks:,} local blocks each"
    store = "unbounded store"
    if setup.store_blocks is not None:
        num_bytes = setup.store_blocks * setup.block_bytes
        unit, unit_bytes = size_unit(num_bytes)
        store = f"store of {num_bytes / unit_bytes:,.1f} {unit}"
    layout = setup.layout
    if trace.recorded_layout not in (None, layout):
        layout += f" (not {trace.recorded_layout}, which was recorded)"
    requests = f"{trace.requests:,} requests"
    if trace.first_requests_only is not None:
        requests = f"the first {requests} only"
    continued = ", last blocks assumed continued" if trace.assume_continued else ""
    return (
        f"{trace.name}: {requests}, {trace.prompt_tokens:,} tokens{continued}\n"
        f"{layout}; {instances}, {local}, {store}"
    )


def table(report: PlanReport) -> str:
    """Return all policies as a table of text."""
    most = max(figures.put_bytes for figures in report.policies.values())
    unit, unit_bytes = size_unit(most)
    rows = [tuple(head.format(unit) for head in _HEADS)]
    for name, figures in report.policies.items():
        from_store = None
        if report.trace.prompt_tokens:
            from_store = figures.store_hit_tokens / report.trace.prompt_tokens
        rows.append(
            (
                name,
                percent(figures.hit_share_of_prompts),
                percent(figures.hit_share_of_ceiling),
                percent(from_store),
                str(figures.zero_hit_requests),
                compact(figures.puts),
                percent(figures.tails_share_of_dense),
                f"{figures.put_bytes / unit_bytes:.1f}" if figures.put_bytes else "-",
                percent(figures.bytes_share_of_dense),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [
            cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def how_to_read(report: PlanReport) -> str:
    """Return what the columns mean."""
    return (
        "hit: prompt tokens that needed no computing. zero hits: of the "
        f"{report.trace.matched_requests:,} requests that share a prefix, how many hit "
        "nothing.\nputs: blocks stored, of one rank. dense: tails at every "
        "scheduler block. ceiling: full attention alone."
    )


def predictions(report: PlanReport) -> Iterator[str]:
    """Yield what became of predicted tails, and what finding their places took."""
    for name, figures in report.policies.items():
        if figures.placement_us is not None:
            yield (
                f"{name}: {figures.predicted_tails:,} tails placed, "
                f"{figures.predicted_served_requests:,} first siblings served, "
                f"{figures.placement_us:.0f} us a request."
            )


def recorded(report: PlanReport) -> str | None:
    """Say how the replay compares with what the recorded engines hit."""
    trace = report.trace
    if trace.recorded_hit_tokens is None or trace.recorded_policy is None:
        return None
    replayed = report.policies[trace.recorded_policy].hit_tokens
    comparison = (
        f"The recorded engines hit {trace.recorded_hit_tokens:,} tokens; replayed "
        f"under the same settings ({trace.recorded_policy}) it is {replayed:,}."
    )
    missing = replayed - trace.recorded_hit_tokens
    if missing > _LARGE_SHARE * trace.prompt_tokens:
        comparison += (
            "\nThey hit less: caches were reset, or lost in a restart, or keys were "
            "evicted. Do not go by the advice yet: plan with --local-blocks 0 (local "
            "caches that are always lost) or --store-gib (a store that evicts)."
        )
    return comparison


def compact(count: int) -> str:
    """Return ``9999``, ``123k`` or ``12.3M``."""
    if count < 10_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 10_000_000 else f"{count / 1e6:.1f}M"


class Bar:
    """Progress on a terminal; says nothing where there is none.

    Args:
        total: How much there is to do.
        stream: Where to draw; default: standard error.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = max(total, 1)
        self._stream = stream or sys.stderr
        self._is_seen = self._stream.isatty()
        self._start = time.monotonic()
        self._drawn = 0.0

    def show(self, done: int) -> None:
        """Draw how much is done, a few times a second."""
        if not self._is_seen:
            return
        now = time.monotonic()
        if now - self._drawn < _BAR_SECONDS and done < self._total:
            return
        self._drawn = now
        full = _BAR_WIDTH * done // self._total
        bar = "#" * full + "." * (_BAR_WIDTH - full)
        left = (now - self._start) * (self._total - done) / max(done, 1)
        self._stream.write(
            f"\r[{bar}] {done:,} of {self._total:,} requests, {left:.0f} s left \x1b[K"
        )
        self._stream.flush()

    def clear(self) -> None:
        """Take the bar away."""
        if self._is_seen:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

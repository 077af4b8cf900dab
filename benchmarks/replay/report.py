# SPDX-License-Identifier: Apache-2.0
"""What a replay reports: figures as JSON, a table, a picture."""

from pathlib import Path
from statistics import median

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from benchmarks.replay.policies import CEILING, DENSE, JUNCTIONS, Policy
from benchmarks.replay.replay import Outcome

# 1: the first. 2: hits of dense's, predicted tails.
SCHEMA_VERSION = 2


class PolicyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on the trace.

    Keys, puts and bytes are of one rank. A share is None where it is one of nothing,
    or of a policy that has not been replayed.

    Attributes:
        summary: What the policy does.
        hit_tokens: Prompt tokens that needed no computing.
        store_hit_tokens: Those of them that came from the store.
        hit_share_of_prompts: ``hit_tokens`` of all prompt tokens.
        hit_share_of_ceiling: ``hit_tokens`` of the ceiling's.
        hit_share_of_dense: ``hit_tokens`` of dense retention's.
        zero_hit_requests: Requests that hit under the ceiling, and nothing here.
        junction_requests: Requests for which the store reported a junction.
        puts: Blocks stored.
        tail_puts: Those of groups other than full attention.
        put_bytes: Bytes stored.
        tails_share_of_dense: ``tail_puts`` of what dense retention stores.
        bytes_share_of_dense: ``put_bytes`` of what dense retention stores.
        stored_bytes: Bytes in the store at the end.
        evicted: Blocks that the store had to let go.
        predicted_tails: Tails placed where a first sibling was expected to part.
        predicted_served_requests: Requests that hit one and less without.
        placement_us: What prediction took a request, median, in microseconds; None
            where nothing was to be predicted.
        lookup_keys: Keys that lookups named: for each group, the blocks of the
            coordinator's lookup mask.
        seconds: How long the replay took.
    """

    summary: str
    hit_tokens: int
    store_hit_tokens: int
    hit_share_of_prompts: float | None
    hit_share_of_ceiling: float | None
    hit_share_of_dense: float | None
    zero_hit_requests: int
    junction_requests: int
    puts: int
    tail_puts: int
    put_bytes: int
    tails_share_of_dense: float | None
    bytes_share_of_dense: float | None
    stored_bytes: int
    evicted: int
    predicted_tails: int
    predicted_served_requests: int
    placement_us: float | None
    lookup_keys: int
    seconds: float


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The trace.

    Attributes:
        name: Its file name.
        requests: Requests replayed.
        first_requests_only: The limit on requests that was asked for; None: all.
        prompt_tokens: Tokens of all prompts.
        matched_requests: Requests that hit under the ceiling.
        assume_continued: See :func:`~benchmarks.replay.trace.number_prompts`.
    """

    name: str
    requests: int
    first_requests_only: int | None
    prompt_tokens: int
    matched_requests: int
    assume_continued: bool


class SetupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace was replayed on. ``store_blocks`` None is no bound."""

    vllm_version: str
    layout: str
    layout_summary: str
    scheduler_block_tokens: int
    block_bytes: int
    instances: int
    router: str
    local_blocks: int
    store_blocks: int | None


class TraceReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of ``results/trace.json``."""

    schema_version: int = SCHEMA_VERSION
    trace: TraceFigures
    setup: SetupFigures
    policies: dict[str, PolicyFigures]


class Replayed(msgspec.Struct, frozen=True):
    """A policy, what became of the trace, and how many seconds it took."""

    policy: Policy
    outcome: Outcome
    seconds: float


def policy_figures(
    replayed: list[Replayed], prompt_tokens: int, block_bytes: int
) -> dict[str, PolicyFigures]:
    """Set all policies in relation to the ceiling and to dense retention.

    Args:
        replayed: The ceiling first; dense retention may not be there yet.
        prompt_tokens: Tokens of all prompts.
        block_bytes: Bytes of a stored block.
    """
    outcomes = {run.policy.name: run.outcome for run in replayed}
    ceiling, dense = outcomes[CEILING], outcomes.get(DENSE, Outcome())
    return {
        run.policy.name: PolicyFigures(
            summary=run.policy.summary,
            hit_tokens=sum(run.outcome.hit_tokens),
            store_hit_tokens=sum(run.outcome.store_hit_tokens),
            hit_share_of_prompts=_share(sum(run.outcome.hit_tokens), prompt_tokens),
            hit_share_of_ceiling=_share(
                sum(run.outcome.hit_tokens), sum(ceiling.hit_tokens)
            ),
            hit_share_of_dense=_share(
                sum(run.outcome.hit_tokens), sum(dense.hit_tokens)
            ),
            zero_hit_requests=sum(
                best > 0 and not hit
                for best, hit in zip(
                    ceiling.hit_tokens, run.outcome.hit_tokens, strict=True
                )
            ),
            junction_requests=run.outcome.num_junction_requests,
            puts=run.outcome.num_puts,
            tail_puts=run.outcome.num_tail_puts,
            put_bytes=run.outcome.num_puts * block_bytes,
            tails_share_of_dense=_share(run.outcome.num_tail_puts, dense.num_tail_puts),
            bytes_share_of_dense=_share(run.outcome.num_puts, dense.num_puts),
            stored_bytes=run.outcome.num_stored * block_bytes,
            evicted=run.outcome.num_evicted,
            predicted_tails=run.outcome.num_predicted_tails,
            predicted_served_requests=run.outcome.num_predicted_served,
            placement_us=_median_us(run.outcome.placement_seconds),
            lookup_keys=run.outcome.num_lookup_keys,
            seconds=run.seconds,
        )
        for run in replayed
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _median_us(seconds: list[float]) -> float | None:
    return median(seconds) * 1e6 if seconds else None


def describe(report: TraceReport) -> str:
    """Say in words what was replayed on what."""
    trace, setup = report.trace, report.setup
    instances = "1 instance"
    if setup.instances > 1:
        instances = f"{setup.instances} instances ({setup.router})"
    local = "no local cache"
    if setup.local_blocks:
        local = f"{setup.local_blocks:,} local blocks each"
    store = "unbounded store"
    if setup.store_blocks is not None:
        gib = setup.store_blocks * setup.block_bytes / 2**30
        store = f"store of {gib:,.0f} GiB"
    requests = f"{trace.requests:,} requests"
    if trace.first_requests_only is not None:
        requests = f"the first {requests} only"
    continued = ", last blocks assumed continued" if trace.assume_continued else ""
    return (
        f"{trace.name}: {requests}, {trace.prompt_tokens:,} tokens{continued}\n"
        f"{setup.layout}; {instances}, {local}, {store}"
    )


def print_report(report: TraceReport, console: Console) -> None:
    """Print all policies in one table, and how to read it."""
    table = Table(
        *(
            Column("policy", no_wrap=True),
            *(
                Column(title, justify="right")
                for title in (
                    *("hit", "of ceiling", "from store", "zero hits", "puts"),
                    *("tails of dense", "GiB put", "of dense", "keys named"),
                )
            ),
        ),
        title=describe(report),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    prompt_tokens = report.trace.prompt_tokens
    for name, figures in report.policies.items():
        table.add_row(
            name.removeprefix(JUNCTIONS) if "+" in name else name,
            percent(figures.hit_share_of_prompts),
            percent(figures.hit_share_of_ceiling),
            percent(_share(figures.store_hit_tokens, prompt_tokens)),
            str(figures.zero_hit_requests),
            compact(figures.puts),
            percent(figures.tails_share_of_dense),
            f"{figures.put_bytes / 2**30:.0f}",
            percent(figures.bytes_share_of_dense),
            compact(figures.lookup_keys),
        )
    console.print(table)
    console.print(
        f"hit: prompt tokens that needed no computing. zero hits: of the "
        f"{report.trace.matched_requests:,} requests that share a prefix (those that "
        "hit under the ceiling, full attention alone), how many hit nothing. puts, "
        "GiB and keys: of one rank. keys named: blocks that lookups ask about where "
        "they ask about all of them at once, as stock does. +: on top of junctions.",
        soft_wrap=False,
    )


def print_predictions(report: TraceReport, console: Console) -> None:
    """Say what became of predicted tails, and what finding their places took."""
    junctions = report.policies.get(JUNCTIONS)
    for name, figures in report.policies.items():
        if figures.placement_us is None or junctions is None:
            continue
        console.print(
            f"{name}: {percent(figures.hit_share_of_dense)} of dense's hits for "
            f"{percent(figures.bytes_share_of_dense)} of its bytes (junctions: "
            f"{percent(junctions.hit_share_of_dense)} for "
            f"{percent(junctions.bytes_share_of_dense)}); {figures.predicted_tails:,} "
            f"tails placed, {figures.predicted_served_requests:,} first siblings "
            f"served, {figures.placement_us:.0f} us a request."
        )


def percent(share: float | None) -> str:
    """Return ``12.3%``, ``100%`` or ``-``."""
    return "-" if share is None else f"{share:.1%}".replace("100.0", "100")


def compact(count: int) -> str:
    """Return ``9999``, ``123k`` or ``12.3M``."""
    if count < 10_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 10_000_000 else f"{count / 1e6:.1f}M"


def write_json(report: TraceReport, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))

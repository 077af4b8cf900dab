# SPDX-License-Identifier: Apache-2.0
"""From files to a plan."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm.junctions.plan.advice import advise
from vllm.junctions.plan.cluster import Cluster, Router
from vllm.junctions.plan.figures import (
    PlanReport,
    TraceFigures,
    policy_figures,
    setup_figures,
)
from vllm.junctions.plan.layouts import DEFAULT_LAYOUT, LAYOUTS
from vllm.junctions.plan.policies import Policy, policies
from vllm.junctions.plan.prompts import ContinuedUnits, Prompt, Units
from vllm.junctions.plan.replay import Replay
from vllm.junctions.plan.shape import Shape
from vllm.junctions.plan.text import Bar
from vllm.junctions.plan.trace import Trace, TraceError
from vllm.junctions.record.format import Layout

_GIB = 1 << 30
_INTERVALS = (1024, 4096, 16384)


@dataclass(frozen=True)
class Options:
    """On what a trace is replayed, and under what; see ``--help``. None: as it says."""

    layout: Layout | None = None
    block_tokens: int | None = None
    instances: int | None = None
    router: Router = "round-robin"
    local_blocks: int | None = None
    store_gib: float | None = None
    intervals: Sequence[int] | None = None
    predict: Sequence[int] = (1, 2)
    requests: int | None = None
    assume_continued: bool = False


def make_plan(paths: Sequence[Path], options: Options) -> PlanReport:
    """Replay traces under all policies.

    Args:
        paths: JSONL files, one an instance.
        options: On what, and under what.

    Raises:
        TraceError: A trace cannot be replayed.
        ValueError: An option does not fit the layout.
    """
    trace = Trace(paths, options.block_tokens, options.requests)
    layout = _layout(trace, options)
    make_units = ContinuedUnits if options.assume_continued else Units
    units = make_units(trace.block_tokens, layout.grain_tokens)
    cluster = cluster_of(layout, options, trace)
    bar = Bar(trace.totals.num_requests)
    try:
        return replay_all(
            trace.prompts(units),
            layout,
            cluster,
            options,
            lambda replay: _trace_figures(trace, options, replay),
            bar.show,
        )
    finally:
        bar.clear()


def replay_all(
    prompts: Iterable[Prompt],
    layout: Layout,
    cluster: Cluster,
    options: Options,
    describe: Callable[[Replay], TraceFigures],
    on_request: Callable[[int], None] = lambda _done: None,
) -> PlanReport:
    """Replay prompts under all policies, and say what follows.

    Args:
        prompts: In order of arrival.
        layout: Of the model.
        cluster: On what.
        options: Under what.
        describe: Says what the prompts were, once they are replayed.
        on_request: Called with the number of prompts that are done.
    """
    start = time.perf_counter()
    todo = _policies(layout, options)
    replay = Replay(todo, layout, cluster)
    for done, prompt in enumerate(prompts, start=1):
        replay.serve(prompt)
        if not done & 0xFF:
            on_request(done)
    replay.finish()
    trace = describe(replay)
    figures = policy_figures(replay, layout.block_bytes, trace.prefill_us_per_token)
    return PlanReport(
        trace=trace,
        setup=setup_figures(layout, cluster),
        policies=figures,
        seconds=time.perf_counter() - start,
        advice=advise(trace, figures, todo, Shape(layout)),
    )


def cluster_of(layout: Layout, options: Options, trace: Trace | None) -> Cluster:
    """Return what to replay on: what is asked for, else what was recorded."""
    headers = trace.headers if trace else []
    instances = options.instances or (trace.num_instances if trace else 1)
    local_blocks = options.local_blocks
    if local_blocks is None:
        local_blocks = min((header.local_blocks for header in headers), default=0)
    store_blocks = None
    if options.store_gib:
        if not layout.block_bytes:
            raise ValueError(f"The bytes of {layout.name}'s blocks are not known.")
        store_blocks = int(options.store_gib * _GIB) // layout.block_bytes
    return Cluster(instances, options.router, local_blocks, store_blocks)


def _layout(trace: Trace, options: Options) -> Layout:
    if options.layout is not None:
        return options.layout
    if not trace.headers:
        return LAYOUTS[DEFAULT_LAYOUT]
    first = trace.headers[0]
    if any(header.layout.groups != first.layout.groups for header in trace.headers):
        raise TraceError("The recordings are of different models: plan each alone.")
    return first.layout


def _policies(layout: Layout, options: Options) -> list[Policy]:
    block = layout.scheduler_block_tokens
    intervals = options.intervals
    if intervals is None:
        intervals = [one for one in _INTERVALS if one % block == 0 and one > block]
    return policies(intervals, block, [one for one in options.predict if one])


def _trace_figures(trace: Trace, options: Options, replay: Replay) -> TraceFigures:
    totals = trace.totals
    per_token = None
    if totals.timed_tokens:
        per_token = totals.timed_ms * 1e3 / totals.timed_tokens
    return TraceFigures(
        name=trace.name,
        files=trace.num_instances,
        requests=replay.num_requests,
        first_requests_only=options.requests,
        prompt_tokens=replay.prompt_tokens,
        matched_requests=replay.outcomes[0].num_hits,
        assume_continued=options.assume_continued,
        lookup_keys=replay.num_lookup_keys,
        forgotten_tokens=replay.num_forgotten_tokens,
        id_spaces=max(len({header.id_space for header in trace.headers}), 1),
        recorded_hit_tokens=totals.hit_tokens if trace.headers else None,
        recorded_policy=None if options.layout else _recorded_policy(trace, replay),
        recorded_layout=trace.headers[0].layout.name if trace.headers else None,
        prefill_us_per_token=per_token,
    )


def _recorded_policy(trace: Trace, replay: Replay) -> str | None:
    """Return what the recorded engines ran, if it was replayed and is one policy."""
    found = {
        (
            header.junctions,
            header.predicted_tails,
            header.layout.retention_interval,
        )
        for header in trace.headers
    }
    if len(found) != 1:
        return None
    junctions, predicted_tails, interval = found.pop()
    return next(
        (
            policy.name
            for policy in replay.policies
            if not policy.full_attention_only
            and policy.retention_interval == interval
            and (policy.junctions == junctions or interval is None)
            and (policy.predicted_tails == predicted_tails or interval is None)
        ),
        None,
    )

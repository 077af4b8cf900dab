# SPDX-License-Identifier: Apache-2.0
"""What a plan reports, as figures."""

from pathlib import Path

import msgspec

from vllm.junctions.plan.cluster import Cluster, Outcome
from vllm.junctions.plan.policies import CEILING, DENSE
from vllm.junctions.plan.replay import Replay
from vllm.junctions.record.format import Layout

# 1, 2: `make bench-trace` before there were plans. 3: recordings, recommendations.
SCHEMA_VERSION = 3


class PolicyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on the trace.

    Keys, puts and bytes are of one rank. A share is None where it is one of nothing.

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
        placement_us: What prediction took a request, in microseconds, on average;
            None where nothing was to be predicted.
        saved_prefill_seconds: Of prefill, compared with stock; None where the trace
            does not say how long prefills took.
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
    saved_prefill_seconds: float | None = None


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The trace.

    Attributes:
        name: Its file name, or names.
        files: How many, one an instance.
        requests: Requests replayed.
        first_requests_only: The limit on requests that was asked for; None: all.
        prompt_tokens: Tokens of all prompts.
        matched_requests: Requests that hit under the ceiling.
        assume_continued: See :class:`~vllm.junctions.plan.prompts.ContinuedUnits`.
        lookup_keys: Keys that lookups name where they ask for all at once.
        forgotten_tokens: Tokens forgotten to stay in memory.
        id_spaces: How many kinds of hash ids there are; what recordings of different
            ones share with each other is not seen.
        recorded_hit_tokens: What the recorded engines hit; None: no recording.
        recorded_policy: The policy that they ran, of those replayed.
        recorded_layout: The layout of the model that they served.
        prefill_us_per_token: What a computed prompt token took, on average.
    """

    name: str
    files: int = 1
    requests: int
    first_requests_only: int | None = None
    prompt_tokens: int
    matched_requests: int
    assume_continued: bool = False
    lookup_keys: int = 0
    forgotten_tokens: int = 0
    id_spaces: int = 1
    recorded_hit_tokens: int | None = None
    recorded_policy: str | None = None
    recorded_layout: str | None = None
    prefill_us_per_token: float | None = None


class SetupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace was replayed on. ``store_blocks`` None is no bound."""

    layout: str
    layout_summary: str
    scheduler_block_tokens: int
    block_bytes: int
    instances: int
    router: str
    local_blocks: int
    store_blocks: int | None


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What to do.

    Attributes:
        policy: The policy to run; ``stock`` where nothing helps.
        helps: Whether that differs from stock.
        settings: For ``kv_connector_extra_config``.
        retention_interval: For ``prefix_cache_retention_interval``.
        sentences: The same in words, and why.
    """

    policy: str
    helps: bool
    settings: dict[str, bool | int]
    retention_interval: int | None
    sentences: list[str]


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that a plan writes as JSON."""

    schema_version: int = SCHEMA_VERSION
    trace: TraceFigures
    setup: SetupFigures
    policies: dict[str, PolicyFigures]
    seconds: float
    advice: Advice | None = None


def setup_figures(layout: Layout, cluster: Cluster) -> SetupFigures:
    """Return what is replayed on what."""
    return SetupFigures(
        layout=layout.name,
        layout_summary=layout.summary,
        scheduler_block_tokens=layout.scheduler_block_tokens,
        block_bytes=layout.block_bytes,
        instances=cluster.num_instances,
        router=cluster.router,
        local_blocks=cluster.local_blocks,
        store_blocks=cluster.store_blocks,
    )


def policy_figures(
    replay: Replay, block_bytes: int, prefill_us_per_token: float | None
) -> dict[str, PolicyFigures]:
    """Set all policies in relation to the ceiling and to dense retention.

    Args:
        replay: Finished.
        block_bytes: Bytes of a stored block.
        prefill_us_per_token: What a computed token took, if known.
    """
    names = [policy.name for policy in replay.policies]
    outcomes = dict(zip(names, replay.outcomes, strict=True))
    figures = {}
    for policy, outcome in zip(replay.policies, replay.outcomes, strict=True):
        saved = None
        if prefill_us_per_token is not None and "stock" in outcomes:
            gained = outcome.hit_tokens - outcomes["stock"].hit_tokens
            saved = gained * prefill_us_per_token / 1e6
        placement_us = None
        if policy.predicted_tails and replay.num_requests:
            placement_us = outcome.placement_seconds / replay.num_requests * 1e6
        figures[policy.name] = _figures(
            outcome,
            outcomes[CEILING],
            outcomes[DENSE],
            replay.prompt_tokens,
            block_bytes,
            summary=policy.summary,
            placement_us=placement_us,
            saved_prefill_seconds=saved,
        )
    return figures


def _figures(
    outcome: Outcome,
    ceiling: Outcome,
    dense: Outcome,
    prompt_tokens: int,
    block_bytes: int,
    **more: object,
) -> PolicyFigures:
    return PolicyFigures(
        hit_tokens=outcome.hit_tokens,
        store_hit_tokens=outcome.store_hit_tokens,
        hit_share_of_prompts=share(outcome.hit_tokens, prompt_tokens),
        hit_share_of_ceiling=share(outcome.hit_tokens, ceiling.hit_tokens),
        hit_share_of_dense=share(outcome.hit_tokens, dense.hit_tokens),
        zero_hit_requests=outcome.num_zero_hits,
        junction_requests=outcome.num_junction_requests,
        puts=outcome.num_puts,
        tail_puts=outcome.num_tail_puts,
        put_bytes=outcome.num_puts * block_bytes,
        tails_share_of_dense=share(outcome.num_tail_puts, dense.num_tail_puts),
        bytes_share_of_dense=share(outcome.num_puts, dense.num_puts),
        stored_bytes=outcome.num_stored * block_bytes,
        evicted=outcome.num_evicted,
        predicted_tails=outcome.num_predicted_tails,
        predicted_served_requests=outcome.num_predicted_served,
        **more,  # type: ignore[arg-type]
    )


def share(part: int, whole: int) -> float | None:
    """Return ``part / whole``; None of nothing."""
    return part / whole if whole else None


def write_json(report: PlanReport, path: Path) -> None:
    """Write a report, and the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))

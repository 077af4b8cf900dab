# SPDX-License-Identifier: Apache-2.0
"""One line a lookup, in words: how far each group reaches, and why no further."""

from collections.abc import Mapping

from vllm.junctions.lookup.coordinator import LookupCoordinator
from vllm.junctions.metrics.lookup_report import LookupReport


def explain(
    report: LookupReport,
    coord: LookupCoordinator,
    hits_by_group: Mapping[int, int],
    last_block_hash: str = "",
) -> str:
    """Return what a lookup found and what holds the joint hit back.

    ``Lookup of 4455 tokens (last block 1f2e3d4c): hit 3584 of at most 4352, longest
    3840; 0-MLAAttention-256 3840, 1-SlidingWindow-64 3584; junctions 3840. Why:
    1-SlidingWindow-64 has no tail or state above 3584.``

    Args:
        report: The lookup.
        coord: The layout.
        hits_by_group: Tokens that each group could reuse alone; empty if not known.
        last_block_hash: Tells lookups of the same length apart.
    """
    usable_tokens = max(coord.align_lookup_length(report.num_tokens - 1), 0)
    last = f" (last block {last_block_hash})" if last_block_hash else ""
    parts = [
        f"hit {report.hit_length} of at most {usable_tokens}, "
        f"longest {report.longest_hit_length}"
    ]
    if hits_by_group:
        names = coord.group_names
        reached = (f"{names[g]} {hit}" for g, hit in sorted(hits_by_group.items()))
        parts.append(", ".join(reached))
    if report.junctions:
        parts.append("junctions " + ", ".join(map(str, report.junctions)))
    reason = _reason(report, coord, hits_by_group, usable_tokens)
    return (
        f"Lookup of {report.num_tokens} tokens{last}: {'; '.join(parts)}. "
        f"Why: {reason}."
    )


def _reason(
    report: LookupReport,
    coord: LookupCoordinator,
    hits_by_group: Mapping[int, int],
    usable_tokens: int,
) -> str:
    unit = coord.align_unit
    if report.error is not None:
        return f"the store failed: {report.error}"
    if report.is_too_short or not usable_tokens:
        return f"a hit has at least {unit} tokens, and the last token is never one"
    if report.lost_tokens:
        return _lagging(coord, hits_by_group, report)
    if report.hit_length == usable_tokens:
        return "this is all that can be hit"
    if report.hit_length:
        return f"no group has the next {unit} tokens"
    return (
        f"no group has the first {unit} tokens: they were never saved, differ, or were "
        "saved with another hash root"
    )


def _lagging(
    coord: LookupCoordinator,
    hits_by_group: Mapping[int, int],
    report: LookupReport,
) -> str:
    names, longest = coord.group_names, report.longest_hit_length
    lagging = [
        f"{names[group]} has no tail or state above {hit}"
        for group, hit in sorted(hits_by_group.items())
        if hit < longest
    ]
    if lagging:
        return ", ".join(lagging)
    if report.lagging_group is not None:
        return f"{names[report.lagging_group]} has no tail or state further up"
    return "the groups have tails, but not at one position"

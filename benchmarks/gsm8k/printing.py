# SPDX-License-Identifier: Apache-2.0
"""A report as tables for people."""

from rich.console import Console
from rich.table import Table

from benchmarks.gsm8k.journal import Settings
from benchmarks.gsm8k.report import Comparison, Interval, Report


def print_report(report: Report, console: Console) -> None:
    """Print all arms, what each question hit, and how the arms compare."""
    _print_arms(report, console)
    _print_hits(report, console)
    if report.comparisons:
        _print_comparisons(report.comparisons, console)
    for line in reading_notes(report):
        console.print(line)


def _print_arms(report: Report, console: Console) -> None:
    table = Table(title="GSM8K with a shared few-shot prefix")
    table.add_column("")
    for name in report.arms:
        table.add_column(name, justify="right")
    arms = report.arms.values()
    rows: dict[str, list[str]] = {
        "questions": [str(arm.questions) for arm in arms],
        "questions that hit the store": [
            "?" if arm.questions_hit is None else str(arm.questions_hit) for arm in arms
        ],
        "tokens from the store": [f"{arm.hit_tokens:,}" for arm in arms],
        "tokens looked up": [f"{arm.query_tokens:,}" for arm in arms],
        "store hit rate": [f"{arm.hit_rate:.1%}" for arm in arms],
        "tokens from the local cache": [f"{arm.local_hit_tokens:,}" for arm in arms],
        "accuracy, 95 %": [_share(arm.accuracy_interval) for arm in arms],
        "answers cut at the limit": [str(arm.answers_cut) for arm in arms],
        "TTFT p50 / p90 / p99, s": [
            f"{t.p50:.2f} / {t.p90:.2f} / {t.p99:.2f}"
            for t in (arm.ttft_seconds for arm in arms)
        ],
        "end to end p50 / p90 / p99, s": [
            f"{t.p50:.2f} / {t.p90:.2f} / {t.p99:.2f}"
            for t in (arm.total_seconds for arm in arms)
        ],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console.print(table)


def _print_hits(report: Report, console: Console) -> None:
    lengths = sorted(
        {hit for arm in report.arms.values() for hit in arm.questions_by_hit}
    )
    if not lengths:
        return
    table = Table(title="Questions by tokens loaded from the store")
    table.add_column("tokens", justify="right")
    for name in report.arms:
        table.add_column(name, justify="right")
    for length in lengths:
        counts = [arm.questions_by_hit.get(length, 0) for arm in report.arms.values()]
        table.add_row(str(length), *map(str, counts))
    console.print(table)


def _print_comparisons(comparisons: list[Comparison], console: Console) -> None:
    table = Table(title="Question by question (differences: second minus first)")
    table.add_column("")
    for entry in comparisons:
        table.add_column(f"{entry.first} -> {entry.second}", justify="right")
    rows: dict[str, list[str]] = {
        "questions": [str(entry.questions) for entry in comparisons],
        "texts that differ": [str(len(entry.differing)) for entry in comparisons],
        "numbers that differ": [
            str(len(entry.differing_numbers)) for entry in comparisons
        ],
        "accuracy difference, 95 %": [
            _share(entry.accuracy_difference) for entry in comparisons
        ],
        "store hit rates": [
            " / ".join(f"{rate:.1%}" for rate in entry.hit_rates)
            for entry in comparisons
        ],
        "TTFT ratio, 95 %": [_ratio(entry.ttft_ratio) for entry in comparisons],
        "end-to-end ratio, 95 %": [_ratio(entry.total_ratio) for entry in comparisons],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console.print(table)


def reading_notes(report: Report) -> list[str]:
    """Say what the figures rest on, and what they must not be read as."""
    arm = next(iter(report.arms.values()))
    notes = [_about_prompts(arm.settings, arm.past_prefix_tokens)]
    if arm.questions_with_own_tail:
        notes.append(
            f"{arm.questions_with_own_tail} of {len(arm.settings.past_prefix_tokens)} "
            "prompts end so close to the shared prefix that their own replay tail "
            "lies within it: later questions hit there without junctions too, by "
            "luck. Do not read those hits as a gain."
        )
    for name, each in report.arms.items():
        if each.restarts:
            notes.append(
                f"{name}: put together from {each.restarts + 1} runs; after a pause "
                "the store was empty, so the last questions' prompts were sent again, "
                "uncounted."
            )
    return notes


def _about_prompts(settings: Settings, reach: tuple[int, int]) -> str:
    words = (
        f"with an instruction of {len(settings.instruction.split())} words behind the "
        "question"
        if settings.instruction
        else "WITHOUT an instruction behind the question, so that stock may hit by luck"
    )
    block = settings.scheduler_block_tokens
    return (
        f"Prompts: {settings.shots} shots of {settings.prefix_tokens} tokens, "
        f"{words}; they reach {reach[0]} to {reach[1]} tokens past the shared prefix "
        f"(scheduler block: {block or 'unknown'}). Local cache "
        f"{'reset before' if settings.reset_local_cache else 'kept between'} questions."
    )


def _share(interval: Interval) -> str:
    return f"{interval.value:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def _ratio(interval: Interval) -> str:
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"

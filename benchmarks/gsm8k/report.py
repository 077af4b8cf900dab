# SPDX-License-Identifier: Apache-2.0
"""From answers to figures: what one run found, and how two runs compare."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.gsm8k.journal import SCHEMA_VERSION, Answer, Journal, Settings
from benchmarks.junction_probe import replay_tails

_RESAMPLES = 10_000
_LEVEL = 0.95


class Interval(msgspec.Struct, frozen=True):
    """A figure between its bounds at 95 %."""

    value: float
    low: float
    high: float


class Percentiles(msgspec.Struct, frozen=True):
    """Of times, in seconds."""

    p50: float
    p90: float
    p99: float
    mean: float


class ArmReport(msgspec.Struct, frozen=True):
    """One way to serve the model. Lengths in tokens.

    Attributes:
        questions_hit: Questions that loaded anything from the store; None: several
            questions were under way at a time.
        hit_tokens: Loaded from the store, over all questions.
        query_tokens: Looked up in the store, or locally where there is no store.
        questions_by_hit: Number of questions by store hit length.
        past_prefix_tokens: Least and most that a prompt reaches past the prefix.
        questions_with_own_tail: Prompts that reach so little past the prefix that
            their own replay tail lies within it, where stock hits too, by luck.
        restarts: How often an earlier run had ended.
    """

    settings: Settings
    questions: int
    questions_hit: int | None
    hit_tokens: int
    query_tokens: int
    hit_rate: float
    local_hit_tokens: int
    correct: int
    accuracy: float
    accuracy_interval: Interval
    answers_cut: int
    ttft_seconds: Percentiles
    total_seconds: Percentiles
    questions_by_hit: dict[int, int]
    past_prefix_tokens: tuple[int, int]
    questions_with_own_tail: int
    restarts: int
    answers: list[Answer]


class Comparison(msgspec.Struct, frozen=True):
    """Two runs over the same questions; differences are second minus first.

    Attributes:
        ttft_ratio: Median over questions of first's time by second's: above 1 the
            second is faster.
        differing: Questions whose answers' texts differ.
    """

    first: str
    second: str
    questions: int
    accuracy_difference: Interval
    hit_rates: tuple[float, float]
    ttft_ratio: Interval
    total_ratio: Interval
    differing: list[int]
    differing_numbers: list[int]


class Report(msgspec.Struct, frozen=True):
    """What ``results/gsm8k.json`` holds."""

    schema_version: int
    date: str
    machine: str
    arms: dict[str, ArmReport]
    comparisons: list[Comparison]


def summarise(journal: Journal) -> ArmReport:
    """Return the figures of the answers that a journal holds."""
    answers = [answer for _, answer in sorted(journal.answers.items())]
    settings, alone = journal.settings, journal.settings.concurrency == 1
    parts = answers if alone else journal.totals
    hit_tokens = sum(part.store_hit_tokens or 0 for part in parts)
    query_tokens = sum(part.query_tokens or 0 for part in parts)
    correct = [answer.correct for answer in answers]
    hits = Counter(
        a.store_hit_tokens for a in answers if a.store_hit_tokens is not None
    )
    reach = settings.past_prefix_tokens
    return ArmReport(
        settings=settings,
        questions=len(answers),
        questions_hit=sum(bool(a.store_hit_tokens) for a in answers) if alone else None,
        hit_tokens=hit_tokens,
        query_tokens=query_tokens,
        hit_rate=hit_tokens / max(query_tokens, 1),
        local_hit_tokens=sum(part.local_hit_tokens or 0 for part in parts),
        correct=sum(correct),
        accuracy=sum(correct) / max(len(correct), 1),
        accuracy_interval=share_interval(correct),
        answers_cut=sum(answer.finish_reason == "length" for answer in answers),
        ttft_seconds=percentiles([answer.ttft_seconds for answer in answers]),
        total_seconds=percentiles([answer.total_seconds for answer in answers]),
        questions_by_hit=dict(sorted(hits.items())),
        past_prefix_tokens=(min(reach), max(reach)),
        questions_with_own_tail=_with_own_tail(settings),
        restarts=sum(answer.after_restart for answer in answers),
        answers=answers,
    )


def _with_own_tail(settings: Settings) -> int:
    block, prefix = settings.scheduler_block_tokens, settings.prefix_tokens
    if not block:
        return 0
    return sum(
        min(replay_tails(prefix + reach, block, eagle=False)) <= prefix
        for reach in settings.past_prefix_tokens
    )


def percentiles(seconds: Sequence[float]) -> Percentiles:
    if not seconds:
        return Percentiles(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return Percentiles(float(p50), float(p90), float(p99), float(np.mean(seconds)))


def share_interval(values: Sequence[bool]) -> Interval:
    """Return a share with its percentile bootstrap interval.

    Where all values are alike, every resample is too; the bound is then the exact
    binomial one: none of 200 gives 0 to 0.018.
    """
    if not values:
        return Interval(0.0, 0.0, 1.0)
    share = sum(values) / len(values)
    if share in (0.0, 1.0):
        bound = 1 - ((1 - _LEVEL) / 2) ** (1 / len(values))
        return Interval(share, *((0.0, bound) if share == 0 else (1 - bound, 1.0)))
    return bootstrap(np.asarray(values, dtype=float), "mean")


def bootstrap(values: np.ndarray, statistic: str) -> Interval:
    """Return the mean or median of values with its percentile bootstrap interval."""
    compute = {"mean": np.mean, "median": np.median}[statistic]
    picks = np.random.default_rng(0).integers(
        len(values), size=(_RESAMPLES, len(values))
    )
    tails = (50 * (1 - _LEVEL), 50 * (1 + _LEVEL))
    low, high = np.percentile(compute(values[picks], axis=1), tails)
    return Interval(float(compute(values)), float(low), float(high))


def compare(
    names: tuple[str, str], first: ArmReport, second: ArmReport
) -> Comparison | None:
    """Compare the questions that both have answered.

    Returns:
        None: the two share no question, or asked different prompts.
    """
    if first.settings.prompts != second.settings.prompts:
        return None
    theirs = {answer.index: answer for answer in second.answers}
    pairs = [(a, theirs[a.index]) for a in first.answers if a.index in theirs]
    if not pairs:
        return None
    correct = np.array([float(b.correct) - float(a.correct) for a, b in pairs])
    ttft = np.array([a.ttft_seconds / b.ttft_seconds for a, b in pairs])
    total = np.array([a.total_seconds / b.total_seconds for a, b in pairs])
    return Comparison(
        first=names[0],
        second=names[1],
        questions=len(pairs),
        accuracy_difference=bootstrap(correct, "mean"),
        hit_rates=(first.hit_rate, second.hit_rate),
        ttft_ratio=bootstrap(ttft, "median"),
        total_ratio=bootstrap(total, "median"),
        differing=[a.index for a, b in pairs if a.text != b.text],
        differing_numbers=[a.index for a, b in pairs if a.number != b.number],
    )


def new_report(arms: dict[str, ArmReport], date: str, machine: str) -> Report:
    """Return a report of arms, with each compared to the first."""
    first, *others = arms
    compared = [compare((first, name), arms[first], arms[name]) for name in others]
    if {"stock", "junctions"} <= set(others):
        compared.append(
            compare(("stock", "junctions"), arms["stock"], arms["junctions"])
        )
    return Report(
        schema_version=SCHEMA_VERSION,
        date=date,
        machine=machine,
        arms=arms,
        comparisons=[comparison for comparison in compared if comparison],
    )

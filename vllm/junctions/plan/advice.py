# SPDX-License-Identifier: Apache-2.0
"""Which settings a trace speaks for, in words."""

from collections.abc import Iterator, Sequence

from vllm.junctions.plan.figures import Advice, PolicyFigures, TraceFigures
from vllm.junctions.plan.policies import CEILING, DENSE, JUNCTIONS, STOCK, Policy
from vllm.junctions.plan.shape import Shape

# The hit rate at which dense retention would be worth its bytes: a tail has to bring
# as many tokens as that, per byte. As in `rules/placement`.
_BREAK_EVEN_HIT_RATE = 0.4
# Of all prompt tokens: what it takes to be worth a change, or a further setting.
_WORTH_SHARE = 0.01
_NEXT_TO_NOTHING = 0.02


def advise(
    trace: TraceFigures,
    figures: dict[str, PolicyFigures],
    policies: Sequence[Policy],
    shape: Shape,
) -> Advice:
    """Choose the policy that gains most tokens beyond what its bytes are worth.

    A step away from stock, and each one further, has to gain 1 % of all prompt
    tokens, so that nobody is told to set what changes next to nothing.

    Args:
        trace: The trace.
        figures: By policy.
        policies: What they were replayed under.
        shape: The layout.
    """
    chosen = _choose(trace, figures, policies, shape)
    settings: dict[str, bool | int] = {"junctions": chosen.junctions}
    if chosen.predicted_tails:
        settings["junctions_predict"] = chosen.predicted_tails
    helps = chosen.name != STOCK
    sentences = (
        [*_why(trace, figures, chosen, settings), *_beyond(chosen, policies, shape)]
        if helps
        else [_why_not(trace, figures, shape)]
    )
    return Advice(
        policy=chosen.name,
        helps=helps,
        settings=settings,
        retention_interval=chosen.retention_interval,
        sentences=sentences,
    )


def _choose(
    trace: TraceFigures,
    figures: dict[str, PolicyFigures],
    policies: Sequence[Policy],
    shape: Shape,
) -> Policy:
    chosen = next(policy for policy in policies if policy.name == STOCK)
    for policy in sorted(policies, key=_effort):
        if policy.full_attention_only or policy.name == STOCK:
            continue
        gained = _worth(figures, policy.name, shape) - _worth(
            figures, chosen.name, shape
        )
        if gained >= _WORTH_SHARE * trace.prompt_tokens:
            chosen = policy
    return chosen


def _effort(policy: Policy) -> tuple[int, ...]:
    """What is least to set, and surest, comes first."""
    return (
        policy.retention_interval is None,
        bool(policy.retention_interval),
        policy.predicted_tails,
    )


def _worth(figures: dict[str, PolicyFigures], name: str, shape: Shape) -> float:
    """Return hit tokens less what the blocks put have to bring."""
    per_block = shape.dense_blocks(0, 64 * shape.block, None) / 64
    price = _BREAK_EVEN_HIT_RATE * shape.block / per_block if per_block else 0.0
    return figures[name].hit_tokens - price * figures[name].tail_puts


def _why(
    trace: TraceFigures,
    figures: dict[str, PolicyFigures],
    chosen: Policy,
    settings: dict[str, bool | int],
) -> list[str]:
    stock, ours = figures[STOCK], figures[chosen.name]
    gained = ours.hit_tokens - stock.hit_tokens
    sentences = [
        _what_to_set(trace, chosen, settings),
        f"Hits go from {percent(stock.hit_share_of_prompts)} to "
        f"{percent(ours.hit_share_of_prompts)} of all prompt tokens "
        f"({gained:,} tokens more, {percent(ours.hit_share_of_ceiling)} of what "
        f"prompts share), for {_more(ours.puts, stock.puts)} blocks put"
        f"{_bytes(ours.put_bytes - stock.put_bytes)}.",
    ]
    if ours.saved_prefill_seconds is not None and trace.prefill_us_per_token:
        each = ours.saved_prefill_seconds / trace.requests * 1e3
        sentences.append(
            f"At the {trace.prefill_us_per_token / 1e3:.3f} ms that a computed prompt "
            f"token took here, that is {_figure(ours.saved_prefill_seconds)} s of "
            f"prefill, or {_figure(each)} ms of time to first token a request, on "
            "average."
        )
    if chosen.name != JUNCTIONS and JUNCTIONS in figures:
        alone = figures[JUNCTIONS]
        sentences.append(
            f"Junctions alone would come to "
            f"{percent(alone.hit_share_of_prompts)} of all prompt tokens, for "
            f"{_more(alone.puts, stock.puts)} blocks."
        )
    return sentences


def _beyond(chosen: Policy, policies: Sequence[Policy], shape: Shape) -> Iterator[str]:
    """Say so where a shorter or a longer interval than those tried may be better."""
    interval = chosen.retention_interval
    tried = [one.retention_interval for one in policies if one.retention_interval]
    if not interval:
        return
    if interval == min(tried) and interval % (2 * shape.block) == 0:
        shorter = interval // 2
        yield f"No shorter interval was tried: see --intervals {shorter} {interval}."
    if interval == max(tried):
        longer = interval * 2
        yield f"No longer interval was tried: see --intervals {interval} {longer}."


def _what_to_set(
    trace: TraceFigures, chosen: Policy, settings: dict[str, bool | int]
) -> str:
    start = "It would help you: set"
    if chosen.name == trace.recorded_policy:
        start = "You run what helps you already:"
    by_config = ", ".join(
        f'"{key}": {str(value).lower()}' for key, value in settings.items()
    )
    interval = chosen.retention_interval
    retention = ""
    if interval != 0:
        retention = f" and start vLLM with --prefix-cache-retention-interval {interval}"
    return f"{start} {by_config}{retention}."


def _why_not(
    trace: TraceFigures, figures: dict[str, PolicyFigures], shape: Shape
) -> str:
    ceiling, stock = figures[CEILING], figures[STOCK]
    start = "It would not help you, because "
    if not shape.layout.sparse_groups:
        return (
            f"{start}{shape.layout.name} has full attention only: its prefixes are "
            "usable as far as they are stored, with stock too."
        )
    shared = ceiling.hit_share_of_prompts or 0.0
    if shared < _NEXT_TO_NOTHING:
        return (
            f"{start}your prompts share next to nothing: {shared:.1%} of their tokens "
            "is all that could be reused."
        )
    best = max(figures[name].hit_tokens for name in figures if name != CEILING)
    if best - stock.hit_tokens < _WORTH_SHARE * trace.prompt_tokens:
        return (
            f"{start}stock already hits {percent(stock.hit_share_of_prompts)} of all "
            f"prompt tokens, {percent(stock.hit_share_of_ceiling)} of what your "
            "prompts share, and no other policy hits 1 % of them more."
        )
    return (
        f"{start}what it would gain costs more than it brings: the most that any "
        f"policy hits is {best:,} tokens against stock's {stock.hit_tokens:,}, for "
        f"{_more(figures[DENSE].puts, stock.puts)} blocks with dense retention."
    )


def percent(part: float | None) -> str:
    """Return ``12.3 %``, ``100 %`` or ``-``."""
    return "-" if part is None else f"{part * 100:.1f} %".replace("100.0", "100")


def _more(puts: int, stock_puts: int) -> str:
    if not stock_puts:
        return f"{puts:,}"
    change = puts / stock_puts - 1
    return f"{abs(change):.1%} {'more' if change >= 0 else 'fewer'}".replace("%", " %")


def _figure(number: float) -> str:
    """Return a number with at least two digits that say something."""
    return f"{number:,.1f}" if abs(number) >= 1 else f"{number:.2g}"


def size_unit(num_bytes: int) -> tuple[str, int]:
    """Return the unit to give a size in, and its bytes."""
    return ("GiB", 1 << 30) if abs(num_bytes) >= 1 << 30 else ("MiB", 1 << 20)


def _bytes(num_bytes: int) -> str:
    unit, unit_bytes = size_unit(num_bytes)
    return f" ({num_bytes / unit_bytes:,.1f} {unit} a rank)" if num_bytes else ""

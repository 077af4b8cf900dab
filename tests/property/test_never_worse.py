# SPDX-License-Identifier: Apache-2.0
"""The law *never worse*: whatever happens on stock happens on ours, or better.

The same plan runs on stock and on ours; see ``happenings.py`` for what it can hold.
"""

from hypothesis import assume, event, given

from testbed.box import WrongKV
from tests.property.happenings import Outcome, Plan, outcome_of, plans
from tests.support import uninstall_hooks


@given(plans())
def test_never_worse(plan: Plan) -> None:
    # Left by the example before: with them stock would not be stock.
    uninstall_hooks()
    try:
        stock = outcome_of(plan, "stock")
    except WrongKV:
        # Stock's own fault; see the laws of test_laws.py.
        assume(False)
        return
    ours = outcome_of(plan, "on")
    event(f"stock dies: {stock.died is not None}")
    event(f"hits alone: {any(ours.alone.values())}")
    event(f"little memory: {plan.is_scarce}")
    assert ours.died is None or stock.died is not None, ours.died
    if ours.died == stock.died:
        assert ours.neighbours == stock.neighbours
    if stock.died is None:
        assert_ends_alike(stock, ours)
        if not plan.is_scarce:
            assert_hits(stock, ours)


def assert_ends_alike(stock: Outcome, ours: Outcome) -> None:
    """Every request that ends on stock ends on ours, with the same tokens."""
    for name, reason in stock.reasons.items():
        tokens, others = ours.tokens[name], stock.tokens[name]
        if "abort" in (reason, ours.reasons[name]):
            # Who was further when the abort came is chance.
            length = min(len(tokens), len(others))
            assert tokens[:length] == others[:length]
        elif name in stock.stuck:
            # A request that stock never ends may get further.
            assert tokens[: len(others)] == others
        else:
            # A session that waits has the context that it has on stock.
            assert (name in ours.waiting) == (name in stock.waiting)
            assert name not in ours.stuck
            assert ours.reasons[name] == reason
            assert tokens == others
    assert ours.is_clean or not stock.is_clean


def assert_hits(stock: Outcome, ours: Outcome) -> None:
    """Where nothing was evicted for room, hits are at least stock's."""
    for name, hit_tokens in stock.alone.items():
        assert ours.alone.get(name, 0) >= hit_tokens
    for name, hit_tokens in stock.others.items():
        assert ours.others[name] >= hit_tokens

# SPDX-License-Identifier: Apache-2.0
"""The law *never worse*: whatever happens on stock happens on ours, or better.

The same scenario runs on stock and on ours, with features that junctions do not use:
sessions with streaming input, pauses that keep or abort requests, resets that preempt,
priorities of arrival, cache salts, several tokens and aborts.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import assume, event, given
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from testbed.box import Box, BoxEngine, EngineOptions, Side, Stuck, WrongKV
from tests.property.scenarios import blocks_for, layouts, prompt_trees

_IDLE_STEPS = 25
_ENGINE_FAULTS = (AssertionError, TypeError, KeyError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Add:
    """Queue a request; a resumable one is a session that waits for more input."""

    prompt: int
    max_tokens: int
    resumable: bool
    salt: str | None


@dataclass(frozen=True)
class Do:
    """One of the other things that happen."""

    what: str
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """A layout, prompts, and what happens on one instance beside a filled store."""

    layout: Any
    prompts: tuple[tuple[int, ...], ...]
    stored: tuple[int, ...]
    events: tuple[Add | Do, ...]
    options: EngineOptions


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layout = draw(layouts)
    prompts = draw(prompt_trees(layout))
    index = st.integers(0, len(prompts) - 1)
    add = st.builds(
        Add,
        index,
        st.sampled_from([1, 1, 2, layout.scheduler_block_tokens + 1]),
        st.sampled_from([False, False, True]),
        st.sampled_from([None, None, "salt"]),
    )
    do = st.builds(
        Do,
        st.sampled_from(
            [
                "steps",
                "idle",
                "hold saves",
                "release saves",
                "more input",
                "abort",
                "pause and keep",
                "pause and abort",
                "reset",
                "forced reset",
            ]
        ),
        st.integers(1, 5),
    )
    events = draw(st.lists(st.one_of(add, add, do, do), min_size=2, max_size=14))
    longest = max(len(prompt) for prompt in prompts) + layout.scheduler_block_tokens
    # Enough for all of them at once: eviction is another matter.
    num_blocks = (len(events) + 1) * blocks_for(layout, 2 * longest + 8)
    options = EngineOptions(
        num_blocks=num_blocks,
        max_batched_tokens=draw(
            st.sampled_from([layout.scheduler_block_tokens * 100, max(longest, 16)])
        ),
        max_requests=16,
        load_failure_policy="recompute",
    )
    stored = tuple(draw(st.lists(index, max_size=3)))
    return Plan(layout, prompts, stored, tuple(events), options)


@dataclass
class Outcome:
    """What became of a plan on one side.

    Attributes:
        died: What ended the engine, if anything did.
        reasons: Why each request ended, by id; None for one that waits.
        tokens: All tokens of each request.
        sessions: Tokens that each session keeps as its context.
        alone: Hit tokens of requests that nothing ran beside.
        is_clean: Whether every block was free at the end.
    """

    died: str | None
    reasons: dict[str, str | None]
    tokens: dict[str, list[int]]
    sessions: dict[str, int]
    alone: dict[str, int]
    is_clean: bool


class _Happening:
    """A plan under way on one engine."""

    def __init__(self, engine: BoxEngine, plan: Plan) -> None:
        self.engine, self.plan = engine, plan
        self.sessions: list[str] = []
        self.alone: dict[str, int] = {}
        self._inputs = 0

    def add(self, number: int, one: Add) -> None:
        engine = self.engine
        was_idle = not engine.scheduler.has_unfinished_requests()
        name = f"{number}"
        fields: dict[str, Any] = {"resumable": one.resumable, "cache_salt": one.salt}
        engine.add(list(self.plan.prompts[one.prompt]), name, one.max_tokens, **fields)
        if one.resumable:
            self.sessions.append(name)
        if was_idle and not self.sessions and not engine.saves.held:
            engine.run()
            self.alone[name] = engine.served[name].hit_tokens

    def do(self, one: Do) -> None:
        getattr(self, "_" + one.what.replace(" ", "_"))(one.count)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def _idle(self, _count: int) -> None:
        self._steps(_IDLE_STEPS)

    def _hold_saves(self, _count: int) -> None:
        self.engine.saves.hold()

    def _release_saves(self, _count: int) -> None:
        self.engine.saves.release()
        self.engine.settle()

    def _more_input(self, count: int) -> None:
        scheduler = self.engine.scheduler
        for name in self.sessions:
            request = scheduler.requests.get(name)
            if (
                request is not None
                and request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            ):
                self._inputs += 1
                first = 9_000_000 + 100 * self._inputs
                more = list(range(first, first + count))
                sequence = self.engine.served[name].sequence
                kept = request.num_computed_tokens
                del sequence.tokens[kept:]
                update = self.engine._make_request(more, name, 1, resumable=True)
                scheduler.add_request(update)
                return

    def _abort(self, _count: int) -> None:
        if self.engine.scheduler.requests:
            self.engine.abort_last()

    def _pause_and_keep(self, _count: int) -> None:
        self.engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self._forced_reset(1)
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _pause_and_abort(self, _count: int) -> None:
        scheduler = self.engine.scheduler
        for request in scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED):
            self.engine.served[request.request_id].finish_reason = "abort"
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self.engine.step()
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def _reset(self, _count: int) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def _forced_reset(self, _count: int) -> None:
        scheduler = self.engine.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        running = {
            block
            for request in scheduler.running
            for group in scheduler.kv_cache_manager.get_block_ids(request.request_id)
            for block in group
        } - {0}
        # With blocks of others vLLM refuses, and says so with an exception.
        if held == len(running) and not self.engine.saves.held:
            scheduler.reset_prefix_cache(reset_running_requests=True)


def happen(plan: Plan, side: Side) -> Outcome:
    with Box(plan.layout, plan.options) as box:
        writer = box.engine("stock")
        for number, index in enumerate(plan.stored):
            writer.serve(list(plan.prompts[index]), f"stored {number}")
        engine = box.engine(side)
        run = _Happening(engine, plan)
        died = None
        try:
            for number, one in enumerate(plan.events):
                run.add(number, one) if isinstance(one, Add) else run.do(one)
            engine.saves.release()
            for _ in range(400):
                if engine.idle:
                    break
                engine.step()
        except WrongKV:
            raise
        except (*_ENGINE_FAULTS, Stuck) as error:
            died = f"{type(error).__name__}: {error}"
        requests = engine._requests
        sessions = {
            name: len(requests[name]._all_token_ids)
            for name in run.sessions
            if name in engine.scheduler.requests
        }
        pool = engine.scheduler.kv_cache_manager.block_pool
        return Outcome(
            died,
            {name: one.finish_reason for name, one in engine.served.items()},
            {name: list(one._all_token_ids) for name, one in requests.items()},
            sessions,
            run.alone,
            pool.get_num_free_blocks() == pool.num_gpu_blocks - 1,
        )


@given(plans())
def test_never_worse(plan: Plan) -> None:
    try:
        stock = happen(plan, "stock")
    except WrongKV:
        # Stock's own fault; see the laws of test_laws.py.
        assume(False)
        return
    ours = happen(plan, "on")
    event(f"stock dies: {stock.died is not None}")
    event(f"hits alone: {Counter(bool(hit) for hit in ours.alone.values())[True] > 0}")
    assert ours.died is None or stock.died is not None, ours.died
    if stock.died is not None:
        return
    for name, reason in stock.reasons.items():
        assert ours.reasons[name] == reason
        if reason is not None:
            assert ours.tokens[name] == stock.tokens[name]
    assert ours.sessions == stock.sessions
    for name, hit_tokens in stock.alone.items():
        assert ours.alone.get(name, 0) >= hit_tokens
    assert ours.is_clean or not stock.is_clean

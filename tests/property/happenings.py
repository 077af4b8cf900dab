# SPDX-License-Identifier: Apache-2.0
"""What can happen to an instance whose users know nothing of junctions.

Features that junctions do not use, in any order: sessions with streaming input,
pauses in every mode, sleep, resets, priorities, several samples, adapters, images,
salts, prompt log-probabilities, aborts, saves that take long. And clients that declare
junctions, whatever they send, with tails that are predicted.
"""

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from testbed.box import (
    Box,
    BoxEngine,
    EngineOptions,
    Layout,
    Neighbour,
    Side,
    Stuck,
    WrongKV,
)
from tests.property.scenarios import blocks_for, declarations, layouts, prompt_trees

_IDLE_STEPS = 25
_PAUSED_STEPS = 60
_LAST_STEPS = 400
_ENGINE_FAULTS = (AssertionError, TypeError, KeyError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Add:
    """Queue a request, or as many as it has samples.

    Attributes:
        prompt: Index of its prompt.
        max_tokens: Tokens to generate.
        resumable: Whether it is a session, which waits for more input.
        salt: As ``cache_salt``.
        adapter: Number of its LoRA adapter; 0 for none.
        image: Token position of an image of two tokens; None for none.
        priority: As ``priority``; matters on an instance that schedules by it.
        prompt_logprobs: Whether it asks for them; vLLM reads no cache then.
        samples: As ``n``.
        declared: What its client declares as junctions, good or bad; None: nothing.
    """

    prompt: int
    max_tokens: int = 1
    resumable: bool = False
    salt: str | None = None
    adapter: int = 0
    image: int | None = None
    priority: int = 0
    prompt_logprobs: bool = False
    samples: int = 1
    declared: Any = None


@dataclass(frozen=True)
class Do:
    """One of the other things that happen; see the methods of ``Happening``."""

    what: str
    count: int = 1


@dataclass(frozen=True)
class Pause:
    """Pause, step as often as a paused engine does, and resume; maybe asleep."""

    mode: str
    clears: bool
    sleeps: bool


Event = Add | Do | Pause


@dataclass(frozen=True)
class Plan:
    """A layout, prompts, and what happens on one instance beside a filled store.

    Attributes:
        layout: The KV-cache layout.
        prompts: Token ids.
        stored: Indices of the prompts that another instance served before.
        events: What happens, in order.
        options: The instance's.
        is_scarce: Whether memory holds little more than one request.
    """

    layout: Layout
    prompts: tuple[tuple[int, ...], ...]
    stored: tuple[int, ...]
    events: tuple[Event, ...]
    options: EngineOptions
    is_scarce: bool


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layout = draw(layouts)
    prompts = draw(prompt_trees(layout))
    is_scarce = draw(st.sampled_from([False, False, True]))
    index = st.integers(0, len(prompts) - 1)
    adds = _adds(layout, index, is_scarce, declarations(max(map(len, prompts))))
    event = st.one_of(adds, adds, _dos, _dos)
    events = draw(st.lists(event, min_size=2, max_size=14))
    longest = max(len(prompt) for prompt in prompts) + layout.scheduler_block_tokens
    enough = blocks_for(layout, 2 * longest + 8)
    # Enough for all of them at once, or for one at a time.
    num_requests = sum(one.samples for one in events if isinstance(one, Add))
    num_blocks = enough + draw(st.integers(0, enough))
    if not is_scarce:
        num_blocks = (num_requests + 1) * enough
    options = EngineOptions(
        num_blocks=num_blocks,
        max_batched_tokens=draw(
            st.sampled_from([layout.scheduler_block_tokens * 100, max(longest, 32)])
        ),
        max_requests=32,
        load_failure_policy="recompute",
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
        extra_config={"junctions_predict": draw(st.sampled_from([0, 2]))},
    )
    stored = tuple(draw(st.lists(index, max_size=3)))
    return Plan(layout, prompts, stored, tuple(events), options, is_scarce)


def _adds(
    layout: Layout,
    index: st.SearchStrategy[int],
    is_scarce: bool,
    declared: st.SearchStrategy[Any],
) -> st.SearchStrategy[Add]:
    plain = st.builds(
        Add,
        index,
        st.sampled_from([1, 1, 2, layout.scheduler_block_tokens + 1]),
        # A session that waits keeps its memory: who gets it first is chance.
        st.just(False) if is_scarce else st.sampled_from([False, False, True]),
        st.sampled_from([None, None, None, "salt"]),
        priority=st.integers(0, 2),
        declared=declared,
    )
    special = st.builds(
        Add,
        index,
        adapter=st.sampled_from([0, 1, 2]),
        image=st.one_of(st.none(), st.integers(0, 3 * layout.scheduler_block_tokens)),
        prompt_logprobs=st.booleans(),
        samples=st.sampled_from([1, 2, 3]),
        declared=declared,
    )
    return st.one_of(plain, plain, special)


_dos = st.one_of(
    st.builds(
        Do,
        st.sampled_from(
            [
                "steps",
                "idle",
                "hold saves",
                "release saves",
                "more input",
                "last input",
                "abort",
                "reset",
                "reset store",
                "forced reset",
                "other instance",
                "other connector",
            ]
        ),
        st.integers(1, 5),
    ),
    st.builds(
        Pause,
        st.sampled_from(["abort", "keep", "wait"]),
        st.booleans(),
        st.booleans(),
    ),
)


@dataclass
class Outcome:
    """What became of a plan on one side.

    Attributes:
        died: What ended the engine, if anything did.
        reasons: Why each request ended, by id; None for one that waits.
        tokens: All tokens of each request.
        waiting: Sessions that wait for input.
        stuck: Requests that wait for something else, and will for ever.
        alone: Hit tokens of requests that nothing ran beside.
        others: Hit tokens of the other instance's requests, while all ran alone.
        neighbours: What engines of another connector, and of none, scheduled.
        is_clean: Whether every block was free at the end.
    """

    died: str | None = None
    reasons: dict[str, str | None] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)
    alone: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    neighbours: list[Any] = field(default_factory=list)
    is_clean: bool = True


class Happening:
    """A plan under way on one engine; what is beside it in its process.

    That is another instance, of stock, and engines of another connector and of none.
    """

    def __init__(
        self,
        engine: BoxEngine,
        other: BoxEngine,
        neighbours: list[Neighbour],
        plan: Plan,
    ) -> None:
        self.engine, self.other, self.plan = engine, other, plan
        self.neighbours = neighbours
        self.sessions: list[str] = []
        self.outcome = Outcome()
        self._num_inputs = 0

    def happen(self, number: int, event: Event) -> None:
        if isinstance(event, Add):
            self._add(number, event)
        elif isinstance(event, Pause):
            self._pause(event)
        else:
            getattr(self, "_" + event.what.replace(" ", "_"))(event.count)

    def _add(self, number: int, one: Add) -> None:
        engine = self.engine
        was_idle = not engine.scheduler.has_unfinished_requests()
        prompt = list(self.plan.prompts[one.prompt])
        names = [f"{number}.{sample}" for sample in range(one.samples)]
        for name in names:
            engine.add(prompt, name, one.max_tokens, **_fields(one, number, prompt))
        if one.resumable:
            self.sessions += names
        if was_idle and not self.sessions and not engine.saves.held:
            engine.run()
            hit_tokens = engine.served[names[0]].hit_tokens
            self.outcome.alone[names[0]] = hit_tokens

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
        self._input(count, False)

    def _last_input(self, count: int) -> None:
        self._input(count, True)

    def _input(self, count: int, is_last: bool) -> None:
        """Send a session input, whatever it is doing: vLLM queues what is early."""
        alive = [name for name in self.sessions if name in self._requests]
        if not alive:
            return
        name = alive[count % len(alive)]
        self._num_inputs += 1
        first = 9_000_000 + 100 * self._num_inputs
        self.engine.add_input(list(range(first, first + count)), name, is_last)
        if is_last:
            self.sessions.remove(name)

    def _abort(self, count: int) -> None:
        # By name: the same one on both sides.
        names = list(self.engine.served)
        if names:
            self._finish(names[-count % len(names)])

    def _finish(self, name: str | None) -> None:
        scheduler = self.engine.scheduler
        for request in scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
            self.engine.served[request.request_id].finish_reason = "abort"

    def _pause(self, event: Pause) -> None:
        """Pause as vLLM's engine core does: finish what a mode finishes, then clear."""
        scheduler = self.engine.scheduler
        if event.mode == "abort":
            self._finish(None)
        is_keep = event.mode == "keep"
        state = PauseState.PAUSED_ALL if is_keep else PauseState.PAUSED_NEW
        scheduler.set_pause_state(state)
        for _ in range(_PAUSED_STEPS):
            if not scheduler.has_requests():
                break
            self.engine.step()
        is_over = not scheduler.has_requests()
        is_clear = is_over and (event.clears or event.sleeps) and self._forced_reset(1)
        if is_clear and event.sleeps:
            # Whatever the memory held is gone.
            self.engine.runner.slots[:] = 0xBADC0FFEE
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def _reset(self, _count: int) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def _reset_store(self, _count: int) -> None:
        if not self._requests:
            # The reset waits for saves, and whoever holds them waits for the reset.
            self.engine.saves.release()
            self.engine.scheduler.reset_prefix_cache(reset_connector=True)

    def _forced_reset(self, _count: int) -> bool:
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
        if held != len(running) or self.engine.saves.held:
            return False
        return scheduler.reset_prefix_cache(reset_running_requests=True)

    def _other_instance(self, count: int) -> None:
        """Serve a prompt on the stock instance of the same process."""
        prompts = self.plan.prompts
        name = f"other {len(self.other.served)}"
        served = self.other.serve(list(prompts[count % len(prompts)]), name)
        self.outcome.others[name] = served.hit_tokens

    def _other_connector(self, count: int) -> None:
        """Serve prompts on the neighbours: they share prefixes."""
        prompts = self.plan.prompts
        for index in range(count, count + 2):
            for neighbour in self.neighbours:
                neighbour.serve(list(prompts[index % len(prompts)]))

    @property
    def _requests(self) -> dict[str, Any]:
        return self.engine.scheduler.requests

    def finish(self) -> Outcome:
        """Let everything end that can, and say what became of it."""
        engine, outcome = self.engine, self.outcome
        outcome.reasons = {n: one.finish_reason for n, one in engine.served.items()}
        outcome.tokens = {
            name: list(one.all_token_ids) for name, one in engine._requests.items()
        }
        pool = engine.scheduler.kv_cache_manager.block_pool
        for name, request in self._requests.items():
            waits = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            (outcome.waiting if waits else outcome.stuck).add(name)
        outcome.neighbours = [one.steps for one in self.neighbours]
        outcome.is_clean = pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        return outcome


def _fields(one: Add, number: int, prompt: list[int]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "resumable": one.resumable,
        "cache_salt": one.salt,
        "priority": one.priority,
        "arrival_time": float(number),
    }
    if one.declared is not None:
        fields["kv_transfer_params"] = {"junctions": one.declared}
    if one.prompt_logprobs:
        fields["prompt_logprobs"] = 1
    if one.adapter:
        fields["lora_request"] = LoRARequest(
            f"adapter-{one.adapter}", one.adapter, "/nowhere"
        )
    if one.image is not None and one.image + 2 <= len(prompt):
        fields["mm_features"] = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=f"image-{number % 2}",
                mm_position=PlaceholderRange(offset=one.image, length=2),
            )
        ]
    return fields


def outcome_of(plan: Plan, side: Side) -> Outcome:
    """Let a plan happen on one side.

    Raises:
        WrongKV: A request would have read KV that is not its own.
    """
    with Box(plan.layout, plan.options) as box, ExitStack() as stack:
        of_one = blocks_for(plan.layout, max(map(len, plan.prompts)) + 4)
        # No more than are needed: vLLM makes an object of each.
        neighbours = [
            stack.enter_context(
                closing(Neighbour(plan.layout, plan.options, name, 2 * of_one))
            )
            for name in ("DecodeBenchConnector", None)
        ]
        # There is room for it to serve any of them, and to remember all of them.
        room = (len(plan.prompts) + 1) * of_one
        other = box.engine("stock", num_blocks=room)
        for number, index in enumerate(plan.stored):
            other.serve(list(plan.prompts[index]), f"stored {number}")
        engine = box.engine(side)
        run = Happening(engine, other, neighbours, plan)
        try:
            for number, event in enumerate(plan.events):
                run.happen(number, event)
            engine.saves.release()
            for _ in range(_LAST_STEPS):
                if engine.idle:
                    break
                engine.step()
        except WrongKV:
            # Stock's own fault, which hits that only one side has can meet; see
            # ``but_for_early_copies`` of test_laws.py.
            assume(not engine.runner.num_early_copies)
            raise
        except (*_ENGINE_FAULTS, Stuck) as error:
            run.outcome.died = f"{type(error).__name__}: {error}"
        return run.finish()

# SPDX-License-Identifier: Apache-2.0
"""Random layouts, prompt trees and things that happen, for the laws to hold in.

All sizes are small: what matters is how they lie to each other, not how large they
are, and a law should see thousands of them.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from hypothesis import strategies as st

from testbed.box import (
    Box,
    BoxEngine,
    EngineOptions,
    Group,
    Layout,
    Served,
    Side,
    Stuck,
)

MAX_PROMPT_BLOCKS = 9
MAX_PREDICTED = 2
_MAX_HELD_STEPS = 100
_TOKENS_PER_PROMPT = 100_000


@dataclass(frozen=True)
class Serve:
    """Run a request, and all others, to the end, saves included if not held back."""

    engine: int
    prompt: int
    max_tokens: int = 1
    # What the client declares, good or bad; None for nothing.
    declared: Any = None


@dataclass(frozen=True)
class Start:
    """Queue a request beside those that run."""

    engine: int
    prompt: int
    max_tokens: int = 1
    declared: Any = None


@dataclass(frozen=True)
class Steps:
    engine: int
    count: int


@dataclass(frozen=True)
class Preempt:
    """Preempt the requests that entered last; their cached blocks may survive."""

    engine: int
    count: int


@dataclass(frozen=True)
class ResetLocal:
    engine: int


@dataclass(frozen=True)
class HoldSaves:
    engine: int


@dataclass(frozen=True)
class ReleaseSaves:
    engine: int


@dataclass(frozen=True)
class EvictFromStore:
    """Lose every ``stride``-th key, of one group or of all."""

    group: int | None
    stride: int


@dataclass(frozen=True)
class FailGets:
    """Let the next few reads of one group's keys fail."""

    group: int
    count: int


Event = (
    Serve
    | Start
    | Steps
    | Preempt
    | ResetLocal
    | HoldSaves
    | ReleaseSaves
    | EvictFromStore
    | FailGets
)


@dataclass(frozen=True, repr=False)
class Scenario:
    """A layout, prompts that share prefixes, and what happens in which order."""

    layout: Layout
    prompts: tuple[tuple[int, ...], ...]
    events: tuple[Event, ...]
    options: EngineOptions
    num_engines: int

    def __repr__(self) -> str:
        # Token ids say nothing; where prompts part does.
        prompts = " | ".join(_summary(prompt) for prompt in self.prompts)
        return (
            f"{self.layout}\n{self.options}\n{self.num_engines} engines, "
            f"prompts {prompts}\n{self.events}"
        )


def _summary(prompt: tuple[int, ...]) -> str:
    """Write a prompt as lengths by origin: ``3 of 0, 5 of 2``."""
    origins = [token // _TOKENS_PER_PROMPT - 1 for token in prompt]
    runs = [(origin, len(list(same))) for origin, same in groupby(origins)]
    return ", ".join(f"{length} of {origin}" for origin, length in runs)


# Layouts


@st.composite
def attention_layouts(draw: st.DrawFn) -> Layout:
    hash_tokens = draw(st.sampled_from([2, 4]))
    sizes = st.sampled_from([hash_tokens, 2 * hash_tokens, 4 * hash_tokens])
    groups = [Group(draw(st.sampled_from(["full", "mla"])), draw(sizes))]
    for _ in range(draw(st.integers(0, 3))):
        block_tokens = draw(sizes)
        window_tokens = draw(st.integers(2, 3 * block_tokens + 1))
        kind = draw(st.sampled_from(["swa", "swa_mla"]))
        groups.append(Group(kind, block_tokens, window_tokens))
    if len(groups) > 1 and draw(st.booleans()):
        # Two groups of one spec, as in DeepSeek-V4.
        groups.append(groups[-1])
    if draw(st.booleans()):
        groups.append(groups[0])
    if len(groups) == 1:
        # A single group is hashed at its own block size.
        hash_tokens = groups[0].block_tokens
    return _with_eagle(draw, Layout(tuple(groups), hash_tokens))


@st.composite
def mamba_layouts(draw: st.DrawFn) -> Layout:
    block_tokens = draw(st.sampled_from([4, 8]))
    hash_tokens = draw(st.sampled_from([block_tokens, block_tokens // 2]))
    groups = [Group("full", block_tokens), Group("mamba", block_tokens)]
    if draw(st.booleans()):
        groups.append(Group("mamba", block_tokens))
    if draw(st.booleans()):
        groups.append(Group("full", block_tokens))
    layout = Layout(
        tuple(groups),
        hash_tokens,
        mamba_junction_checkpoints=draw(st.booleans()),
    )
    return _with_eagle(draw, layout)


def _with_eagle(draw: st.DrawFn, layout: Layout) -> Layout:
    if not draw(st.booleans()):
        return layout
    groups = list(layout.groups)
    attention = [i for i, group in enumerate(groups) if group.kind != "mamba"]
    # None flagged makes vLLM treat all as flagged.
    flagged = draw(st.sampled_from([None, *attention]))
    if flagged is not None:
        groups[flagged] = replace(groups[flagged], eagle=True)
    return replace(layout, groups=tuple(groups), drops_eagle_block=True)


layouts = st.one_of(attention_layouts(), attention_layouts(), mamba_layouts())


# Prompts


@st.composite
def prompt_trees(draw: st.DrawFn, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Prompts of which each shares a prefix with an earlier one."""
    block = layout.scheduler_block_tokens
    longest = MAX_PROMPT_BLOCKS * block
    prompts: list[tuple[int, ...]] = []
    for index in range(draw(st.integers(2, 5))):
        shared: tuple[int, ...] = ()
        if prompts:
            parent = prompts[draw(st.integers(0, len(prompts) - 1))]
            shared = parent[: _length(draw, len(parent), block)]
        own = max(_length(draw, max(longest - len(shared), 0), block), 1)
        first = (index + 1) * _TOKENS_PER_PROMPT
        prompts.append((*shared, *range(first, first + own)))
    return tuple(prompts)


def _length(draw: st.DrawFn, limit: int, block: int) -> int:
    """Any length up to a limit, often on a block boundary or right beside one."""
    blocks = draw(st.integers(0, limit // block))
    off = draw(st.one_of(st.sampled_from([0, 1, -1]), st.integers(0, block - 1)))
    return min(max(blocks * block + off, 0), limit)


def declarations(longest: int) -> st.SearchStrategy[Any]:
    """What clients declare: mostly nothing or positions, now and then anything."""
    positions = st.lists(st.integers(1, longest), max_size=6)
    odd = st.one_of(
        st.integers(-2, 2 * longest),
        st.sampled_from([True, None, "8", 8.0, [8], {"8": 8}, 1 << 80]),
    )
    return st.one_of(
        st.none(),
        st.none(),
        positions.map(sorted),
        positions,
        st.lists(odd, max_size=6),
        odd,
    )


# What happens


def _options(
    draw: st.DrawFn, layout: Layout, num_blocks: int, first_siblings: bool
) -> EngineOptions:
    block = layout.scheduler_block_tokens
    chunk_tokens = draw(
        st.one_of(
            st.sampled_from([block, 2 * block, 100 * block]),
            st.integers(4, 3 * block),
        )
    )
    return EngineOptions(
        num_blocks=num_blocks,
        max_batched_tokens=max(chunk_tokens, 4),
        max_requests=4,
        extra_config={
            "lookup_async": draw(st.booleans()),
            **({"junctions_predict": MAX_PREDICTED} if first_siblings else {}),
        },
        load_failure_policy="recompute",
    )


def blocks_for(layout: Layout, num_tokens: int) -> int:
    """Return how many blocks a request of ``num_tokens`` tokens can hold at most."""
    per_group = [num_tokens // group.block_tokens + 3 for group in layout.groups]
    return sum(per_group) + 1


@st.composite
def quiet_scenarios(draw: st.DrawFn, first_siblings: bool = False) -> Scenario:
    """One request at a time; nothing is evicted, saves may come late.

    With ``first_siblings`` tails are predicted, and clients declare positions.
    """
    layout = draw(layouts)
    prompts = draw(prompt_trees(layout))
    num_engines = draw(st.integers(1, 2))
    engines = st.integers(0, num_engines - 1)
    longest = max(len(prompt) for prompt in prompts)
    declared = declarations(longest) if first_siblings else st.none()
    serve = st.builds(
        Serve,
        engines,
        st.integers(0, len(prompts) - 1),
        st.sampled_from([1, 1, 3]),
        declared,
    )
    event = st.one_of(
        serve,
        serve,
        serve,
        st.builds(ResetLocal, engines),
        st.builds(HoldSaves, engines),
        st.builds(ReleaseSaves, engines),
    )
    order = [
        Serve(draw(engines), index, declared=draw(declared))
        for index in range(len(prompts))
    ]
    events = (*order, *draw(st.lists(event, max_size=6)))
    # No more than are needed: vLLM makes an object of each.
    num_blocks = len(events) * blocks_for(layout, longest + 4) + 1
    options = _options(draw, layout, num_blocks, first_siblings)
    return Scenario(layout, prompts, events, options, num_engines)


@st.composite
def rough_scenarios(
    draw: st.DrawFn, gets_fail: bool = False, first_siblings: bool = False
) -> Scenario:
    """Anything goes: little memory, preemption, evictions, failing gets.

    With ``first_siblings`` tails are predicted, and clients declare positions.

    Gets do not fail on stock instances, which can wait for ever then; see
    ``tests/engine/test_faults.py``. An instance with nothing to gain is one.
    """
    layout = draw(layouts)
    prompts = draw(prompt_trees(layout))
    num_engines = draw(st.integers(1, 2))
    engines = st.integers(0, num_engines - 1)
    indices = st.integers(0, len(prompts) - 1)
    max_tokens = st.sampled_from([1, 2, layout.scheduler_block_tokens + 1])
    group = st.one_of(st.none(), st.integers(0, len(layout.groups) - 1))
    longest = max(len(prompt) for prompt in prompts)
    declared = declarations(longest) if first_siblings else st.none()
    events = [
        st.builds(Serve, engines, indices, max_tokens, declared),
        st.builds(Start, engines, indices, max_tokens, declared),
        st.builds(Start, engines, indices, max_tokens, declared),
        st.builds(Steps, engines, st.integers(1, 4)),
        st.builds(Preempt, engines, st.integers(1, 4)),
        st.builds(ResetLocal, engines),
        st.builds(HoldSaves, engines),
        st.builds(ReleaseSaves, engines),
        st.builds(EvictFromStore, group, st.integers(1, 3)),
    ]
    if gets_fail and layout.is_sparse:
        groups = st.integers(0, len(layout.groups) - 1)
        events.append(st.builds(FailGets, groups, st.integers(1, 3)))
    event = st.one_of(events)
    enough = blocks_for(layout, longest + layout.scheduler_block_tokens + 1)
    num_blocks = enough + draw(st.integers(0, enough))
    return Scenario(
        layout,
        prompts,
        tuple(draw(st.lists(event, min_size=3, max_size=14))),
        _options(draw, layout, num_blocks, first_siblings),
        num_engines,
    )


# Running


class Run:
    """A scenario under way on one side, or on a side per instance."""

    def __init__(self, scenario: Scenario, *sides: Side) -> None:
        self.scenario = scenario
        self.box = Box(scenario.layout, scenario.options)
        for index in range(scenario.num_engines):
            self.box.engine(sides[index % len(sides)])
        self._num_requests = 0

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.box.close()

    def engine(self, index: int) -> BoxEngine:
        return self.box.engines[index]

    def all_events(self) -> None:
        for event in self.scenario.events:
            self.happen(event)
        self.finish()

    def happen(self, event: Event) -> Any:
        return getattr(self, f"_{type(event).__name__}")(event)

    def finish(self) -> None:
        """Let everything that is still under way come to its end."""
        for engine in self.box.engines:
            _client(engine).saves.release()
            self._run(engine)

    def _run(self, engine: BoxEngine) -> None:
        """Run to the end; requests that wait for each other's memory lose one."""
        while True:
            try:
                engine.run()
                return
            except Stuck:
                if not engine.waits_for_memory:
                    raise
                engine.abort_last()

    def saves_are_held(self, index: int) -> bool:
        return _client(self.engine(index)).saves.held

    def chunk_ends(self, index: int, served: Served) -> list[int]:
        """Return where each step of a request ended, in tokens, from its hit on."""
        steps = [
            step.num_scheduled_tokens.get(served.request_id, 0)
            for step in self.engine(index).steps
        ]
        return list(accumulate(steps, initial=served.hit_tokens))

    def hashes_of(self, event: Serve) -> list[bytes]:
        """Return the block hashes that a request will have."""
        prompt = list(self.scenario.prompts[event.prompt])
        return self.engine(event.engine).block_hashes(prompt)

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests}"

    def _Serve(self, event: Serve) -> Any:
        engine = self.engine(event.engine)
        prompt = list(self.scenario.prompts[event.prompt])
        served = engine.add(prompt, self._next_id(), event.max_tokens, **_params(event))
        if _client(engine).saves.held:
            # Held saves hold blocks: there may be too few left to end.
            for _ in range(_MAX_HELD_STEPS):
                if engine.scheduler.has_unfinished_requests():
                    engine.step()
        else:
            self._run(engine)
        return served

    def _Start(self, event: Start) -> None:
        prompt = list(self.scenario.prompts[event.prompt])
        self.engine(event.engine).add(
            prompt, self._next_id(), event.max_tokens, **_params(event)
        )

    def _Steps(self, event: Steps) -> None:
        for _ in range(event.count):
            self.engine(event.engine).step()

    def _Preempt(self, event: Preempt) -> None:
        self.engine(event.engine).preempt(event.count)

    def _ResetLocal(self, event: ResetLocal) -> None:
        # Refused while blocks are in use; then nothing happens.
        self.engine(event.engine).scheduler.reset_prefix_cache()

    def _HoldSaves(self, event: HoldSaves) -> None:
        _client(self.engine(event.engine)).saves.hold()

    def _ReleaseSaves(self, event: ReleaseSaves) -> None:
        engine = self.engine(event.engine)
        _client(engine).saves.release()
        engine.settle()

    def _EvictFromStore(self, event: EvictFromStore) -> None:
        keys = [key for key in self.box.store.values if _in_group(key, event.group)]
        lost = set(keys[:: event.stride])
        self.box.store.evict(lambda key: key in lost)

    def _FailGets(self, event: FailGets) -> None:
        self.box.store.fail_gets(event.group, event.count)


def _params(event: Serve | Start) -> dict[str, Any]:
    if event.declared is None:
        return {}
    return {"kv_transfer_params": {"junctions": event.declared}}


def _client(engine: BoxEngine) -> Any:
    assert engine.client is not None
    return engine.client


def _in_group(key: str, group: int | None) -> bool:
    return group is None or f"@group:{group}@" in key

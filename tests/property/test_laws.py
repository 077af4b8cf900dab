# SPDX-License-Identifier: Apache-2.0
"""The laws, over random layouts, prompt trees, and what can happen to them.

Whatever runs in a box also stops with ``WrongKV`` as soon as a request would read
KV that is not its own.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from hypothesis import assume, event, given

from testbed.box import BoxEngine, Served, Side, WrongKV
from tests.property.model import ReuseModel, in_local_cache, in_store
from tests.property.scenarios import (
    MAX_PREDICTED,
    Run,
    Scenario,
    Serve,
    quiet_scenarios,
    rough_scenarios,
)
from vllm.junctions.core.request import RequestJunctions, junctions_of
from vllm.junctions.store.scheduler import JunctionStoreScheduler


@given(rough_scenarios(gets_fail=True, first_siblings=True))
def test_nothing_wrong(scenario: Scenario) -> None:
    """No value and no loaded block ever holds another prefix's KV."""
    with Run(scenario, "on") as run, but_for_early_copies(run):
        run.all_events()

        assert run.box.faults() == []
        for engine in run.box.engines:
            assert_nothing_is_held(engine)


@given(rough_scenarios(first_siblings=True))
def test_nothing_wrong_beside_instances_without_junctions(scenario: Scenario) -> None:
    """Instances of both kinds can share a store."""
    with (
        Run(scenario, "on", "off") as run,
        but_for_padding(run),
        but_for_early_copies(run),
    ):
        run.all_events()

        assert run.box.faults() == []


def but_for_padding(run: Run) -> AbstractContextManager[None]:
    """Set runs aside in which a stock instance stores wrong KV.

    A request that enters with one token to compute is padded with draft rows, and
    stock saves them as if they were tokens; see ``tests/engine/test_field_bugs.py``.
    """
    return _but_for(run, lambda engine: engine.num_padded_prefills)


def but_for_early_copies(run: Run) -> AbstractContextManager[None]:
    """Set runs aside in which stock copies a block before it has been written.

    See ``test_a_hit_within_a_block_is_not_copied_before_it_is_written`` of
    ``tests/engine/test_box.py``.
    """
    return _but_for(run, lambda engine: engine.runner.num_early_copies)


@contextlib.contextmanager
def _but_for(run: Run, num_struck: Callable[[BoxEngine], int]) -> Iterator[None]:
    try:
        yield
    except AssertionError:
        assume(not any(map(num_struck, run.box.engines)))
        raise


@given(quiet_scenarios(first_siblings=True))
def test_nothing_missed(scenario: Scenario) -> None:
    """Later siblings hit at least where an earlier request found and kept a junction.

    And every hit is what brute force finds in the store or locally.
    """
    model = ReuseModel(scenario.layout)
    with Run(scenario, "on") as run:
        for request in served_one_by_one(run):
            usable = max(request.in_store.joint, request.locally.joint)
            assert request.hit_tokens <= usable
            assert request.hit_tokens == usable or not model.found_by_vllm(usable)
            assert request.hit_tokens >= request.promised_tokens
        run.finish()
        assert run.box.faults() == []


@given(quiet_scenarios(first_siblings=True))
def test_nothing_dense(scenario: Scenario) -> None:
    """What is stored beyond stock's are tails at junctions, and nothing is less.

    Junctions that were found, declared or predicted, and of the latter two no more
    than there may be.
    """
    assert_nothing_dense(scenario, stored(scenario, "stock"), stored(scenario, "on"))


@dataclass(frozen=True)
class Stored:
    """What a scenario left in the store.

    Attributes:
        keys: ``(group id, prefix tokens, key)`` of everything ever stored.
        at_junctions: Group and hash of the tails at junctions that were found.
        by_chance: Group and hash of proof blocks that may be gone when they are due:
            where chunks end decides, and chunks end elsewhere once something was hit.
            And of tails below a hit that the same prompt could not have in the store.
    """

    keys: set[tuple[int, int, str]]
    at_junctions: set[tuple[int, str]]
    by_chance: set[tuple[int, str]]


def stored(scenario: Scenario, side: Side) -> Stored:
    model = ReuseModel(scenario.layout)
    at_junctions: set[tuple[int, str]] = set()
    by_chance: set[tuple[int, str]] = set()
    with Run(scenario, side) as run:
        for request in served_one_by_one(run):
            by_chance |= request.proofs_lost
            replayed = model.provable_in_store(len(request.prompt))
            if request.hit_tokens > replayed:
                # See tests/engine/test_limits.py: what its replay needs stock computes.
                by_chance |= _named(model.tails(replayed), request.hashes)
            for position in request.junctions:
                at_junctions |= _named(model.tails(position), request.hashes)
        run.finish()
        return Stored(run.box.stored(), at_junctions, by_chance)


def assert_nothing_dense(scenario: Scenario, stock: Stored, ours: Stored) -> None:
    by_chance = stock.by_chance | ours.by_chance
    # Junction stops move chunk ends, and with them at which of its other positions
    # a Mamba group happens to have a state: there the laws of hits have to do.
    attention = {i for i, g in enumerate(scenario.layout.groups) if g.kind != "mamba"}
    missing, extra = (
        {
            (group, key.rpartition("@")[2])
            for group, _, key in ones
            if group in attention
        }
        for ones in (stock.keys - ours.keys, ours.keys - stock.keys)
    )
    event(f"extra puts: {min(len(extra), 3)}, left to chance: {len(by_chance) > 0}")
    assert missing <= by_chance
    assert extra <= ours.at_junctions | by_chance


@given(rough_scenarios(first_siblings=True))
def test_off_is_stock(scenario: Scenario) -> None:
    """Switched off, keys, hits and block tables are those of the stock connector."""
    assert traces(scenario, "off") == traces(scenario, "stock")


def traces(scenario: Scenario, side: Side) -> tuple:
    with Run(scenario, side) as run:
        try:
            run.all_events()
        except WrongKV as error:
            # Stock's own, see but_for_early_copies. It has to be the same on both
            # sides; what was still on its way to the store is chance.
            return str(error), [engine.steps for engine in run.box.engines]
        return (
            run.box.store.puts,
            [
                [
                    (one.request_id, one.local_hit_tokens, one.store_hit_tokens)
                    for one in engine.served.values()
                ]
                for engine in run.box.engines
            ],
            [[step for step in engine.steps if step] for engine in run.box.engines],
        )


def assert_nothing_is_held(engine: BoxEngine) -> None:
    """All requests have ended, and every block but the null block is free."""
    reasons = {served.finish_reason for served in engine.served.values()}
    assert reasons <= {"length", "abort"}
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


# One request after the other, next to the model


@dataclass
class Observed:
    """A request that was served, and what the model says of it."""

    prompt: tuple[int, ...]
    hit_tokens: int
    in_store: object
    locally: object
    junctions: set[int]
    promised_tokens: int
    # Group and hash of proof blocks that were gone, or never there, when due.
    proofs_lost: set[tuple[int, str]]
    # Block hash in hexadecimal by the prefix length that it stands for.
    hashes: dict[int, str] = field(default_factory=dict)


@dataclass
class _Promise:
    """A junction that a request kept, open until its saves have landed."""

    prompt: tuple[int, ...]
    position: int
    engine: int


def served_one_by_one(run: Run):
    """Run all events; yield each served request with what the model expects."""
    model = ReuseModel(run.scenario.layout)
    hash_tokens = run.scenario.layout.hash_tokens
    promises: list[_Promise] = []
    for step in run.scenario.events:
        if not isinstance(step, Serve):
            run.happen(step)
            continue
        engine = run.engine(step.engine)
        prompt = run.scenario.prompts[step.prompt]
        hashes = run.hashes_of(step)
        asked = len(prompt) // model.unit_tokens * model.unit_tokens
        in_the_store = model.reuse(
            len(prompt), in_store(run.box.store, hashes, hash_tokens, asked)
        )
        locally = model.reuse(len(prompt), in_local_cache(engine, hashes, hash_tokens))
        promised = max(
            (p.position for p in promises if _is_due(p, prompt, model, run)), default=0
        )
        served = run.happen(step)
        chunk_ends = run.chunk_ends(step.engine, served)
        named = {
            (unit + 1) * hash_tokens: bytes(name).hex()
            for unit, name in enumerate(hashes)
        }
        lost = [
            proof
            for position in range(0, len(prompt), model.block_tokens)
            for proof in model.proofs_lost(position, chunk_ends)
        ]
        if served.hit_tokens:
            lost += model.proofs_of_nothing()
        extra = junctions_of(engine.request(served.request_id))
        declared = model.declared(
            step.declared if places_extra_tails(engine) else None,
            len(prompt),
            served.hit_tokens,
        )
        assert_extra_tails_are_in_bounds(extra, declared, prompt, served, model)
        junctions = model.junctions(in_the_store) | model.junctions(locally)
        junctions |= {*extra.declared, *extra.predicted}
        promises += [
            _Promise(prompt, position // model.block_tokens * model.block_tokens, i)
            for i in [step.engine]
            for position in model.kept(
                locally, in_the_store, extra.declared, extra.predicted
            )
            if position > served.hit_tokens
            and model.found_by_vllm(position // model.block_tokens * model.block_tokens)
            and model.proofs_last(position, chunk_ends)
        ]
        yield Observed(
            prompt,
            served.hit_tokens,
            in_the_store,
            locally,
            junctions,
            promised,
            _named(lost, named),
            named,
        )


def places_extra_tails(engine: BoxEngine) -> bool:
    """Whether an instance is one of ours: not stock, switched off or with no gain."""
    connector = engine.scheduler.connector
    return isinstance(connector.connector_scheduler, JunctionStoreScheduler)


def assert_extra_tails_are_in_bounds(
    extra: RequestJunctions,
    declared: set[int],
    prompt: tuple[int, ...],
    served: Served,
    model: ReuseModel,
) -> None:
    """What a request declared and was predicted is what the rules allow."""
    assert len(extra.predicted) <= MAX_PREDICTED
    assert len(extra.predicted) + len(extra.declared) <= 4
    for position in (*extra.declared, *extra.predicted):
        assert served.hit_tokens < position <= len(prompt)
        assert position % model.block_tokens == 0
    if not model.has_chunk_stops:
        assert set(extra.declared) == declared
    event(f"declared: {len(extra.declared)}, predicted: {len(extra.predicted)}")


def _named(
    blocks: Iterable[tuple[int, int]], named: dict[int, str]
) -> set[tuple[int, str]]:
    return {(group_id, named[end]) for group_id, end in blocks if end in named}


def _is_due(
    promise: _Promise, prompt: tuple[int, ...], model: ReuseModel, run: Run
) -> bool:
    """Whether a request must hit at least at a promised position."""
    proof = model.proof_block_tokens
    # A lookup asks for whole scheduler blocks, the proof block's included.
    reach = promise.position + (model.block_tokens if proof else 0)
    shared = _shared_tokens(prompt, promise.prompt)
    return (
        shared >= promise.position + proof
        and len(prompt) > max(promise.position, reach - 1)
        and len(promise.prompt) >= reach
        and not run.saves_are_held(promise.engine)
    )


def _shared_tokens(prompt: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(prompt, other, strict=False)
    return next(
        (index for index, (one, two) in enumerate(pairs) if one != two),
        min(len(prompt), len(other)),
    )

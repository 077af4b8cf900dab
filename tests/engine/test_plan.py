# SPDX-License-Identifier: Apache-2.0
"""Traffic recorded by a real scheduler, and the plan of it: do its figures hold?"""

import random
from pathlib import Path

import msgspec
import pytest

from testbed.box import Box, EngineOptions, Group, Layout, Side
from vllm.junctions.plan.run import Options, make_plan
from vllm.junctions.plan.trace import Trace
from vllm.junctions.record.format import Header

DEEPSEEK_V4_MTP = Layout(
    (
        Group("mla", 256),
        Group("swa_mla", 4, 8),
        Group("swa_mla", 8, 128),
        Group("swa_mla", 64, 128),
        Group("swa_mla", 64, 128, eagle=True),
    ),
    hash_tokens=4,
    drops_eagle_block=True,
)
GEMMA = Layout((Group("full", 32), Group("swa", 32, 64)), hash_tokens=32)
LAYOUTS = {"DeepSeek-V4 with MTP": DEEPSEEK_V4_MTP, "Gemma": GEMMA}
POLICIES: dict[Side, str] = {"off": "stock", "on": "junctions"}
NUM_REQUESTS = 60


def traffic(seed: int) -> list[list[int]]:
    """Documents with questions, and chats: prompts of up to 9,000 tokens."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> list[int]:
        return [rng.randrange(1, 1 << 20) for _ in range(rng.randint(low, high))]

    documents = [text(500, 5_000) for _ in range(4)]
    chats = [text(100, 1_500) for _ in range(3)]
    prompts = []
    for _ in range(NUM_REQUESTS):
        if rng.random() < 0.5:
            prompts.append(rng.choice(documents) + text(20, 900))
            continue
        chat = rng.choice(chats)
        chat += text(20, 300)
        prompts.append(list(chat))
        chat += text(20, 200)
    return prompts


def hit_tokens(report, policy: str) -> tuple[int, int]:
    figures = report.policies[policy]
    return figures.hit_tokens - figures.store_hit_tokens, figures.store_hit_tokens


@pytest.mark.parametrize("local", [False, True], ids=["store alone", "local cache"])
@pytest.mark.parametrize("side", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_plan_predicts_what_the_recorded_engine_hits(layout, side, local, tmp_path):
    path = tmp_path / "traffic.jsonl"
    options = EngineOptions(side=side, extra_config={"junctions_record": str(path)})
    with Box(layout, options) as box:
        engine = box.engine()
        served = []
        for index, prompt in enumerate(traffic(seed=1)):
            if not local:
                engine.reset_local_cache()
            served.append(engine.serve(prompt, f"r{index}"))
    report = make_plan([path], Options(local_blocks=None if local else 0))

    assert report.trace.requests == NUM_REQUESTS
    local_hits = sum(request.local_hit_tokens for request in served)
    store_hits = sum(request.store_hit_tokens for request in served)
    assert report.trace.recorded_hit_tokens == local_hits + store_hits > 0
    assert report.trace.recorded_policy == POLICIES[side]
    planned_local, planned_store = hit_tokens(report, POLICIES[side])
    assert planned_local + planned_store == pytest.approx(
        local_hits + store_hits, rel=0.03
    )
    if not local:
        assert planned_store == pytest.approx(store_hits, rel=0.03)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_recording_of_stock_predicts_what_junctions_would_hit(layout, tmp_path):
    path = tmp_path / "traffic.jsonl"
    hits = {}
    for side in ("off", "on"):
        extra = {"junctions_record": str(path)} if side == "off" else {}
        with Box(layout, EngineOptions(side=side, extra_config=extra)) as box:
            engine = box.engine()
            served = []
            for index, prompt in enumerate(traffic(seed=2)):
                engine.reset_local_cache()
                served.append(engine.serve(prompt, f"r{index}"))
            hits[side] = sum(request.store_hit_tokens for request in served)
    report = make_plan([path], Options(local_blocks=0))

    assert hit_tokens(report, "stock")[1] == pytest.approx(hits["off"], rel=0.03)
    assert hit_tokens(report, "junctions")[1] == pytest.approx(hits["on"], rel=0.03)
    assert hits["on"] > hits["off"]


def test_the_first_line_says_what_was_served(tmp_path):
    path = tmp_path / "traffic.jsonl"
    options = EngineOptions(extra_config={"junctions_record": str(path)})
    with Box(DEEPSEEK_V4_MTP, options) as box:
        box.engine().serve(list(range(1, 700)), "only", max_tokens=3)
    header = msgspec.json.decode(path.read_bytes().splitlines()[0], type=Header)

    assert header.block_tokens == 64
    assert header.layout.scheduler_block_tokens == 256
    assert [group.drops for group in header.layout.groups] == [
        *(False, False, False, True, True)
    ]
    assert header.local_blocks == options.num_blocks
    assert header.layout.speculative == "eagle"
    (line,) = path.read_bytes().splitlines()[1:]
    only = msgspec.json.decode(line)
    assert (only["input_length"], only["output_length"]) == (699, 3)
    assert len(only["hash_ids"]) == 11
    assert only["ttft_ms"] >= only["prefill_ms"] > 0


def test_recording_with_stock_settings_leaves_everything_else_stock(tmp_path):
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
        connector,
        scheduler,
    )

    extra = {"junctions_record": str(tmp_path / "traffic.jsonl")}
    with Box(GEMMA, EngineOptions(side="off", extra_config=extra)) as box:
        made = box.engine().scheduler.connector
        assert isinstance(made, connector.MooncakeStoreConnector)
        assert type(made).__bases__[1:] == (connector.MooncakeStoreConnector,)
        assert type(made.connector_scheduler) is scheduler.MooncakeStoreScheduler


def test_a_model_of_one_group_is_recorded_too(tmp_path):
    path = tmp_path / "traffic.jsonl"
    options = EngineOptions(extra_config={"junctions_record": str(path)})
    with Box(Layout((Group("full", 32),), hash_tokens=32), options) as box:
        box.engine().serve(list(range(1, 200)), "only")
    report = make_plan([path], Options())
    assert report.advice is not None
    assert "has full attention only" in report.advice.sentences[0]


def test_requests_that_ended_before_their_prompt_was_computed_are_left_out(tmp_path):
    path = tmp_path / "traffic.jsonl"
    options = EngineOptions(
        max_batched_tokens=64, extra_config={"junctions_record": str(path)}
    )
    with Box(GEMMA, options) as box:
        engine = box.engine()
        engine.add(list(range(1, 400)), "ends early")
        engine.step()
        engine.abort_last()
        engine.run()
        engine.add(list(range(1, 60)), "ends late", max_tokens=50)
        for _ in range(3):
            engine.step()
        engine.abort_last()
        engine.run()
    assert Trace([Path(path)]).totals.prompt_tokens == 59

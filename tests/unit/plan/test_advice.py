# SPDX-License-Identifier: Apache-2.0
"""Recordings of three kinds of traffic, and what their plans advise."""

import json
import random
import sys

import msgspec
import pytest

from vllm.junctions.plan import __main__ as command
from vllm.junctions.plan.figures import PlanReport
from vllm.junctions.plan.layouts import LAYOUTS
from vllm.junctions.plan.run import Options, make_plan
from vllm.junctions.record.format import Header, Layout

BLOCK = 64


def documents(rng: random.Random, new) -> list[tuple[int, list[int]]]:
    """Documents of 3,000 to 20,000 tokens with four questions each."""
    made = []
    for _ in range(60):
        document = new(rng.randint(3_000, 20_000) // BLOCK)
        for _ in range(4):
            length = len(document) * BLOCK + rng.randint(700, 1_500)
            made.append((length, document + new(-(-length // BLOCK) - len(document))))
    return made


def chat(rng: random.Random, new) -> list[tuple[int, list[int]]]:
    """Chats whose every turn sends all that was said."""
    made = []
    for _ in range(40):
        history: list[int] = []
        for _ in range(6):
            history = history + new(rng.randint(5, 20))
            made.append((len(history) * BLOCK, history))
            history = history + new(rng.randint(5, 10))
    return made


def unrelated(rng: random.Random, new) -> list[tuple[int, list[int]]]:
    lengths = [rng.randint(500, 20_000) for _ in range(200)]
    return [(length, new(-(-length // BLOCK))) for length in lengths]


@pytest.fixture
def record(tmp_path):
    def record(kind, prefill_ms=None, layout=LAYOUTS["deepseek-v4-flash"], **settings):
        rng, last = random.Random(0), iter(range(1 << 40))
        header = Header(
            junctions_recording=1,
            block_tokens=BLOCK,
            start_ms=0,
            id_space="a",
            layout=layout,
            **{"junctions": False, **settings},
        )
        lines = [msgspec.json.encode(header).decode()]
        for number, (length, ids) in enumerate(
            kind(rng, lambda count: [next(last) for _ in range(count)])
        ):
            line = {
                "timestamp": 1_000 * number,
                "input_length": length,
                "output_length": 1,
                "hash_ids": ids,
            }
            if prefill_ms:
                line |= {"prefill_ms": length * prefill_ms, "ttft_ms": 900}
            lines.append(json.dumps(line))
        path = tmp_path / "traffic.jsonl"
        path.write_text("\n".join([*lines, ""]))
        return path

    return record


def advice_for(path):
    return make_plan([path], Options()).advice


def test_documents_with_questions_want_junctions_and_predicted_tails(record):
    advice = advice_for(record(documents))
    assert advice.helps
    assert advice.settings == {"junctions": True, "junctions_predict": 1}
    assert advice.retention_interval == 0
    assert advice.sentences[0].startswith('It would help you: set "junctions": true')


def test_chats_are_served_by_stock_already(record):
    advice = advice_for(record(chat))
    assert not advice.helps
    assert advice.settings == {"junctions": False}
    assert "because stock already hits" in advice.sentences[0]


def test_where_nothing_is_shared_nothing_helps(record):
    advice = advice_for(record(unrelated))
    assert not advice.helps
    assert "because your prompts share next to nothing" in advice.sentences[0]


def test_full_attention_alone_needs_no_help(record):
    (full, *_) = LAYOUTS["gemma3-12b"].groups
    layout = Layout(
        name="dense-model",
        groups=(full,),
        scheduler_block_tokens=16,
        hash_block_tokens=16,
    )
    advice = advice_for(record(documents, layout=layout))
    assert not advice.helps
    assert "dense-model has full attention only" in advice.sentences[0]


def test_prefill_times_become_time_saved(record):
    report = make_plan([record(documents, prefill_ms=0.5)], Options())
    assert report.trace.prefill_us_per_token == pytest.approx(500)
    chosen = report.policies[report.advice.policy]
    gained = chosen.hit_tokens - report.policies["stock"].hit_tokens
    assert chosen.saved_prefill_seconds == pytest.approx(gained * 500e-6)
    assert "0.500 ms" in " ".join(report.advice.sentences)


def test_the_command_prints_writes_and_draws(record, tmp_path, capsys):
    path = record(documents)
    out, picture = tmp_path / "out" / "plan.json", tmp_path / "out" / "plan.png"
    assert command.main([str(path), "--json", str(out), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "It would help you" in printed
    assert "junctions+predict-1" in printed
    report = msgspec.json.decode(out.read_bytes(), type=PlanReport)
    assert report.policies["dense"].bytes_share_of_dense == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def branching(rng: random.Random, new) -> list[tuple[int, list[int]]]:
    """Documents of which each question sends another part from the start."""
    made = []
    for _ in range(60):
        document = new(rng.randint(3_000, 20_000) // BLOCK)
        for _ in range(3):
            ids = document[: rng.randint(len(document) // 4, len(document))]
            ids = ids + new(rng.randint(5, 30))
            made.append((len(ids) * BLOCK, ids))
    rng.shuffle(made)
    return made


def test_the_best_of_the_intervals_tried_need_not_be_the_best(record):
    path = record(branching)
    (said,) = make_plan([path], Options()).advice.sentences[-1:]
    assert said == "No shorter interval was tried: see --intervals 512 1024."
    tried = make_plan([path], Options(intervals=(512, 1024, 2048))).advice
    assert tried.retention_interval == 1024
    assert "was tried" not in tried.sentences[-1]


def test_another_layout_than_the_recorded_one_is_said(record, capsys):
    path = record(unrelated)
    assert command.main([str(path), "--layout", "gemma3-12b"]) == 0
    printed = capsys.readouterr().out
    assert "gemma3-12b (not deepseek-v4-flash, which was recorded); 1" in printed
    assert "replayed under the same settings" not in printed


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--predict", "5"), "5 is not one of 0 to 4, as junctions_predict is"),
        (("--store-gib", "0"), "0 is no size above 0"),
        (("--store-gib", "nan"), "nan is no size above 0"),
    ],
)
def test_an_option_out_of_range_says_what_it_takes(record, capsys, option, message):
    with pytest.raises(SystemExit, match="2"):
        command.main([str(record(unrelated)), *option])
    assert message in capsys.readouterr().err


def test_a_store_may_hold_half_a_gib_and_nothing_may_be_predicted(record, capsys):
    path = record(unrelated)
    assert command.main([str(path), "--store-gib", "0.5", "--predict", "0"]) == 0
    printed = capsys.readouterr().out
    assert "store of 511." in printed
    assert "junctions+predict" not in printed


def test_settings_that_are_in_use_are_not_advised_anew(record):
    path = record(documents, junctions=True, predicted_tails=1)
    report = make_plan([path], Options())
    assert report.trace.recorded_policy == report.advice.policy
    assert report.advice.sentences[0].startswith("You run what helps you already")


@pytest.mark.parametrize(("kind", "differs"), [(chat, True), (documents, False)])
def test_a_replay_that_hits_more_than_the_engines_says_what_to_try(
    record, capsys, kind, differs
):
    """The recordings say that nothing was hit; of documents stock hits nothing."""
    assert command.main([str(record(kind))]) == 0
    printed = capsys.readouterr().out
    assert ("plan with --local-blocks 0" in printed) == differs


def test_without_matplotlib_a_sentence_says_so(record, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = tmp_path / "plan.png"
    assert command.main([str(record(documents)), "--picture", str(picture)]) == 0
    assert "No picture: that needs matplotlib" in capsys.readouterr().out
    assert not picture.exists()


def test_what_cannot_be_planned_is_one_sentence(tmp_path, capsys):
    assert command.main([str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("plan: Cannot read the trace")

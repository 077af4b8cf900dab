# SPDX-License-Identifier: Apache-2.0
"""The benchmark as it is run: files, figures, faults."""

import itertools

import msgspec
import pytest

from benchmarks import trace_replay
from benchmarks.replay import picture
from benchmarks.replay.policies import policies
from benchmarks.replay.replay import Outcome
from benchmarks.replay.report import Replayed, TraceReport, describe, policy_figures
from tests.unit.benchmarks.replay.layouts import request

SHARED = (1, 2)
TRACE = [
    request(2048, *SHARED, first, first + 1, timestamp=first)
    for first in range(10, 20, 2)
]


@pytest.fixture
def run(tmp_path):
    def run(*args, trace=TRACE):
        path = tmp_path / "trace.jsonl"
        path.write_bytes(msgspec.json.Encoder().encode_lines(trace))
        return trace_replay.main(
            [
                str(path),
                *("--json", str(tmp_path / "out" / "trace.json")),
                *("--picture", str(tmp_path / "out" / "trace.png")),
                *args,
            ]
        )

    return run


def read_report(tmp_path) -> TraceReport:
    return msgspec.json.decode(
        (tmp_path / "out" / "trace.json").read_bytes(), type=TraceReport
    )


def test_a_run_writes_figures_and_a_picture(run, tmp_path, capsys):
    assert run("--intervals", "256") == 0
    report = read_report(tmp_path)
    figures = report.policies
    assert list(figures) == [
        *("ceiling", "dense", "stock", "junctions", "every-256"),
        *("junctions+every-256", "junctions+predict-1", "junctions+predict-2"),
    ]
    assert report.schema_version == 2
    assert (report.trace.requests, report.trace.matched_requests) == (5, 4)
    # MTP: one scheduler block below the shared 1024 tokens; the first sibling pays.
    assert figures["ceiling"].hit_tokens == 4 * 1024
    assert figures["junctions"].hit_tokens == 3 * 768
    assert figures["junctions"].hit_share_of_ceiling == 3 * 768 / (4 * 1024)
    assert figures["junctions"].zero_hit_requests == 1
    assert figures["stock"].zero_hit_requests == 4
    assert figures["dense"].bytes_share_of_dense == 1
    assert figures["every-256"].tails_share_of_dense > 0.9
    stock, ours = (figures[name].put_bytes for name in ("stock", "junctions"))
    assert stock < ours < figures["dense"].put_bytes
    assert (tmp_path / "out" / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert "junctions" in capsys.readouterr().out


def test_what_limits_a_run_is_in_its_report(run, tmp_path):
    options = ("--requests", "3", "--assume-continued", "--store-gib", "1")
    assert run(*options, "--layout", "gemma3-12b", "--instances", "2") == 0
    report = read_report(tmp_path)
    assert report.trace.requests == report.trace.first_requests_only == 3
    assert report.trace.assume_continued
    assert report.setup.store_blocks == 1024
    assert "the first 3 requests only" in describe(report)


def test_a_trace_that_shares_nothing_has_no_shares_and_no_picture(run, tmp_path):
    trace = [request(1024, 2 * index, 2 * index + 1) for index in range(3)]
    assert run(trace=trace) == 0
    assert read_report(tmp_path).policies["junctions"].hit_share_of_ceiling is None
    assert not (tmp_path / "out" / "trace.png").exists()


def test_what_was_finished_is_kept_when_a_run_is_interrupted(
    run, tmp_path, monkeypatch, capsys
):
    replay_all = trace_replay.replay_all

    def interrupted(*args):
        yield from itertools.islice(replay_all(*args), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(trace_replay, "replay_all", interrupted)
    assert run() == 130
    assert list(read_report(tmp_path).policies) == ["ceiling", "dense"]
    assert "what was finished is in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--intervals", "100"), "100 tokens is no positive multiple"),
        (("--store-gib", "0"), "0 is below 1"),
        (("--local-blocks", "-1"), "-1 is below 0"),
        (("--layout", "bert"), "invalid choice: 'bert'"),
    ],
)
def test_an_option_that_makes_no_sense_ends_with_its_name(run, args, message, capsys):
    try:
        status = run(*args)
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests."),
        ('{"timestamp": 0, "input_l', "is no complete JSON object"),
        ('{"timestamp": 0}', "is no request: Object missing required field"),
    ],
)
def test_a_trace_that_is_none_ends_with_one_sentence(tmp_path, text, message, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    json_path = tmp_path / "trace.json"
    assert trace_replay.main([str(path), "--json", str(json_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("trace_replay: ")
    assert message in line
    assert not json_path.exists()


def test_a_trace_that_is_not_there_or_not_named_is_asked_for(tmp_path, capsys):
    assert trace_replay.main([str(tmp_path / "none.jsonl")]) == 2
    assert "Cannot read the trace" in capsys.readouterr().err
    assert trace_replay.main([]) == 2
    assert "make bench-trace TRACE=path" in capsys.readouterr().err


def test_shares_wait_for_what_they_are_shares_of():
    ceiling, dense, stock, _ = policies([], 256)
    outcome = Outcome([512, 0], [512, 0], num_puts=4, num_tail_puts=2)
    half = Outcome([0, 0], [0, 0], num_puts=2, num_tail_puts=1)
    runs = [Replayed(ceiling, outcome, 1.0), Replayed(stock, half, 1.0)]
    assert policy_figures(runs, 2048, 10)["stock"].bytes_share_of_dense is None
    runs.append(Replayed(dense, outcome, 1.0))
    figures = policy_figures(runs, 2048, 10)["stock"]
    assert (figures.hit_share_of_ceiling, figures.zero_hit_requests) == (0, 1)
    assert (figures.bytes_share_of_dense, figures.put_bytes) == (0.5, 20)
    assert figures.tails_share_of_dense == 0.5


def test_a_picture_needs_two_points(tmp_path, run):
    run("--intervals")
    report = read_report(tmp_path)
    only = {"ceiling": report.policies["ceiling"]}
    path = tmp_path / "none.png"
    report = msgspec.structs.replace(report, policies=only)
    assert not picture.write_picture(report, path)
    assert not path.exists()

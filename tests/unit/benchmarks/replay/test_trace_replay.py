# SPDX-License-Identifier: Apache-2.0
"""The benchmark as it is run: files, figures, faults."""

import msgspec
import pytest

from benchmarks import trace_replay
from tests.unit.plan.layouts import request
from vllm.junctions.plan.figures import PlanReport

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


def read_report(tmp_path) -> PlanReport:
    return msgspec.json.decode(
        (tmp_path / "out" / "trace.json").read_bytes(), type=PlanReport
    )


def test_a_run_writes_figures_and_a_picture(run, tmp_path, capsys):
    assert run("--intervals", "256") == 0
    report = read_report(tmp_path)
    figures = report.policies
    assert list(figures) == [
        *("ceiling", "dense", "stock", "junctions", "every-256"),
        *("junctions+every-256", "junctions+predict-1", "junctions+predict-2"),
    ]
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


def test_what_limits_a_run_is_in_its_report(run, tmp_path, capsys):
    options = ("--requests", "3", "--assume-continued", "--store-gib", "1")
    assert run(*options, "--layout", "gemma3-12b", "--instances", "2") == 0
    report = read_report(tmp_path)
    assert report.trace.requests == report.trace.first_requests_only == 3
    assert report.trace.assume_continued
    assert report.setup.store_blocks == 1024
    assert "the first 3 requests only" in capsys.readouterr().out


def test_a_trace_that_shares_nothing_has_no_shares_and_no_picture(run, tmp_path):
    trace = [request(1024, 2 * index, 2 * index + 1) for index in range(3)]
    assert run(trace=trace) == 0
    assert read_report(tmp_path).policies["junctions"].hit_share_of_ceiling is None
    assert not (tmp_path / "out" / "trace.png").exists()


def test_made_up_traffic_needs_no_trace(tmp_path):
    files = ("--json", str(tmp_path / "a.json"), "--picture", str(tmp_path / "a.png"))
    assert (
        trace_replay.main(["--traffic", "documents", "--requests", "50", *files]) == 0
    )
    assert (tmp_path / "a.json").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--intervals", "100"), "100 tokens is no positive multiple"),
        (("--store-gib", "0"), "0 is no size above 0"),
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


def test_a_trace_that_is_not_there_or_not_named_is_asked_for(tmp_path, capsys):
    assert trace_replay.main([str(tmp_path / "none.jsonl")]) == 2
    assert "Cannot read the trace" in capsys.readouterr().err
    assert trace_replay.main([]) == 2
    assert "make bench-trace TRACE=path" in capsys.readouterr().err

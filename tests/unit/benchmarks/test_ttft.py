# SPDX-License-Identifier: Apache-2.0
"""The TTFT benchmark's arithmetic, and two stand-ins for its servers."""

import time
from contextlib import ExitStack

import msgspec
import pytest

from benchmarks import ttft_speedup
from benchmarks.ttft_speedup import Sample, TtftReport, family, summarise
from testbed.processes import free_port
from tests.fake_vllm import FakeVllm

LENGTHS = [64, 128, 256, 512]


def test_a_family_parts_right_after_the_prefix():
    prompts = family(seed=0, prefix_tokens=100, siblings=4, tail_tokens=30)
    assert [len(prompt) for prompt in prompts] == [130, 137, 144, 151, 158]
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 1
    assert len({prompt[100] for prompt in prompts}) == 5
    assert family(0, 100, 4, 30) == prompts
    assert family(0, 101, 4, 30)[0][:50] != prompts[0][:50]


def samples(stock, ours):
    return [
        Sample(side, 512, position, 600, hit, seconds)
        for side, rows in (("stock", stock), ("junctions", ours))
        for position, (hit, seconds) in enumerate(rows)
    ]


def test_medians_from_the_third_sibling_on():
    result = summarise(
        samples(
            [(0, 9.0), (0, 4.0), (0, 4.0), (0, 6.0), (0, 8.0)],
            [(0, 9.0), (0, 5.0), (512, 1.0), (480, 2.0), (512, 4.0)],
        ),
        loaded_bytes=3000,
    )
    assert result.stock_ttft_seconds == 6.0
    assert result.junctions_ttft_seconds == 2.0
    assert result.ratio == 3.0
    assert result.ratio_range == (2.0, 4.0)
    assert result.first_sibling_ratio == 0.8
    assert (result.stock_hit_tokens, result.junctions_hit_tokens) == (0, 480)
    assert result.loaded_bytes == 1000


def test_bytes_are_unknown_without_a_log():
    rows = [(0, 1.0), (0, 1.0), (0, 1.0)]
    assert summarise(samples(rows, rows), None).loaded_bytes is None


class Sibling(FakeVllm):
    """Takes a millisecond per 64 tokens that do not hit; hits from the third on."""

    def __init__(self, junctions):
        super().__init__(connector=True, answer=self.wait)
        self.junctions = junctions
        self.hits = self.hit
        self.seen = {}

    def hit(self, number, tokens):
        prefix = min(LENGTHS, key=lambda length: abs(length + 24 * 4 - tokens))
        count = self.seen[prefix] = self.seen.get(prefix, 0) + 1
        self.missing = tokens
        if number > 0 and self.junctions and count > 2 + (prefix == LENGTHS[-1]):
            self.missing = tokens - prefix
            return 0, prefix
        return 0, 0

    def wait(self, prompt):
        time.sleep(self.missing / 64_000)
        return "x"


def arguments(tmp_path, stock, ours):
    return [
        *("--stock-url", stock, "--junctions-url", ours),
        *("--lengths", *map(str, LENGTHS)),
        *("--json", str(tmp_path / "out" / "ttft.json")),
    ]


def test_both_sides_in_one_run(tmp_path):
    with ExitStack() as stack:
        stock, ours = (stack.enter_context(Sibling(on)) for on in (False, True))
        assert (
            ttft_speedup.main(arguments(tmp_path, stock.base_url, ours.base_url)) == 0
        )
    path = tmp_path / "out" / "ttft.json"
    report = msgspec.json.decode(path.read_bytes(), type=TtftReport)
    assert [row.prefix_tokens for row in report.lengths] == LENGTHS
    assert [row.junctions_hit_tokens for row in report.lengths] == LENGTHS
    assert {row.stock_hit_tokens for row in report.lengths} == {0}
    assert stock.prompts == ours.prompts
    assert len(report.samples) == 2 * 5 * len(LENGTHS)
    assert path.with_suffix(".png").stat().st_size > 10_000
    # One reset a request and one at the end of each length.
    resets = ours.calls.count("/reset_prefix_cache")
    assert resets == (5 + 1) * len(LENGTHS)


def test_what_was_measured_stays_when_a_server_dies(tmp_path, capsys):
    with ExitStack() as stack:
        stock, ours = (stack.enter_context(Sibling(on)) for on in (False, True))
        ours.fails_from = 1 + 5 * 2 + 1
        assert (
            ttft_speedup.main(arguments(tmp_path, stock.base_url, ours.base_url)) == 1
        )
    assert "engine died" in capsys.readouterr().err
    report = msgspec.json.decode(
        (tmp_path / "out" / "ttft.json").read_bytes(), type=TtftReport
    )
    assert [row.prefix_tokens for row in report.lengths] == LENGTHS[:2]


def test_no_server(tmp_path, capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert ttft_speedup.main(arguments(tmp_path, url, url)) == 1
    assert "No server answers at" in capsys.readouterr().err


def test_a_server_without_the_store(tmp_path, capsys):
    with FakeVllm() as server:
        urls = (server.base_url, server.base_url)
        assert ttft_speedup.main(arguments(tmp_path, *urls)) == 1
    assert "runs without MooncakeStoreConnector" in capsys.readouterr().err


def test_different_models_are_not_compared(tmp_path, capsys):
    with ExitStack() as stack:
        one = stack.enter_context(FakeVllm(connector=True, model="a"))
        two = stack.enter_context(FakeVllm(connector=True, model="b"))
        assert ttft_speedup.main(arguments(tmp_path, one.base_url, two.base_url)) == 1
    assert "The two servers differ" in capsys.readouterr().err


def test_too_long_prompts(tmp_path, capsys):
    with FakeVllm(connector=True) as server:
        more = arguments(tmp_path, server.base_url, server.base_url)
        assert ttft_speedup.main([*more, "--lengths", "70000"]) == 1
    assert "give smaller --lengths" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stock-url", "http://x"], "go together"),
        (["--siblings", "1"], "2 or more"),
        (["--lengths", "0"], "not positive"),
    ],
)
def test_arguments_that_make_no_sense(args, message, capsys):
    with pytest.raises(SystemExit):
        ttft_speedup.parse_args(args)
    assert message in capsys.readouterr().err

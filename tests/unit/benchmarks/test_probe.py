# SPDX-License-Identifier: Apache-2.0
"""The probe's own arithmetic, and a server without dev mode."""

import http.server
import threading

import pytest

from benchmarks import junction_probe
from benchmarks.junction_probe import build_prompts, parse_args, replay_tails


@pytest.mark.parametrize(
    ("prompt_tokens", "eagle", "expected"),
    [
        (4448, False, {4352}),
        (4448, True, {4096}),
        (4352, False, {4096, 4352}),
        (4352, True, {3840, 4096}),
        (100, True, {0}),
    ],
)
def test_where_replay_tails_lie(prompt_tokens, eagle, expected):
    assert replay_tails(prompt_tokens, 256, eagle) == expected


def test_prompts_share_what_they_should_and_nothing_else():
    args = parse_args(["--tail-tokens", "600", "--first-tail-tokens", "1400"])
    prompts = build_prompts(args, 256, 8)
    shared = prompts["A"][:3848]
    assert {name: len(prompt) for name, prompt in prompts.items()} == {
        "A": 5248,
        "B": 4448,
        "C": 4455,
        "D": 4462,
    }
    assert all(prompt[:3848] == shared for prompt in prompts.values())
    assert len({tuple(prompt[3848:3864]) for prompt in prompts.values()}) == 4
    assert build_prompts(args, 256, 8) == prompts
    assert build_prompts(args, 256, 160)["A"][:100] != shared[:100]


def test_a_server_without_dev_mode_is_named(capsys):
    class NoDevMode(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), NoDevMode) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert junction_probe.main(["--base-url", url]) == 1
        server.shutdown()
    printed = capsys.readouterr().err
    assert "runs without dev mode" in printed
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL" in printed


@pytest.mark.parametrize("args", [["--diverge", "0"], ["--prefix-tokens", "-5"]])
def test_nonsense_lengths_are_refused(args, capsys):
    with pytest.raises(SystemExit):
        parse_args(args)
    assert "is not a positive number of tokens" in capsys.readouterr().err

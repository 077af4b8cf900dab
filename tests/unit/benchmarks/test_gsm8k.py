# SPDX-License-Identifier: Apache-2.0
"""The GSM8K benchmark against a stand-in for the server."""

import http.server
import threading

import msgspec
import numpy as np
import pytest

from benchmarks import gsm8k_shared_prefix
from benchmarks.gsm8k import data
from benchmarks.gsm8k.arms import ARMS
from benchmarks.gsm8k.data import INSTRUCTION, extract_answer, prompt_for
from benchmarks.gsm8k.report import Report, bootstrap, share_interval
from benchmarks.junction_probe import ProbeError
from testbed.processes import free_port
from tests.fake_vllm import FakeVllm

QUESTIONS = 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She has 3 + 4 = <<3+4=7>>7.\n#### 7", "7"),
        ("#### 1,250.00", "1250"),
        ("#### -12", "-12"),
        ("#### $0.50 each", "0.5"),
        ("####18\n\n#### 19", "18"),
        ("#### 100", "100"),
        ("the answer is 7", None),
        ("#### none", None),
    ],
)
def test_the_answer_in_a_text(text, expected):
    assert extract_answer(text) == expected


def test_where_the_instruction_stands():
    assert prompt_for("P", "How many?", "Think.") == (
        "PQuestion: How many?\nThink.\nAnswer:"
    )
    assert prompt_for("P", "How many?", "") == "PQuestion: How many?\nAnswer:"
    # No token is longer than a word, so these are forty at least.
    assert len(INSTRUCTION.split()) >= 40


@pytest.fixture
def files(tmp_path):
    """Dataset, few-shot examples and result path, as arguments."""
    for name in ("test", "train"):
        lines = [
            {"question": f"What is {n} {name}?", "answer": f"It is.\n#### {n}"}
            for n in range(QUESTIONS)
        ]
        (tmp_path / f"{name}.jsonl").write_bytes(
            b"\n".join(msgspec.json.encode(line) for line in lines) + b"\n"
        )
    return {
        "--dataset": tmp_path / "test.jsonl",
        "--shots-from": tmp_path / "train.jsonl",
        "--json": tmp_path / "out" / "gsm8k.json",
        "--shots": 2,
        "--questions": QUESTIONS,
    }


def run(files, base_url, *more):
    arguments = [str(part) for pair in files.items() for part in pair]
    return gsm8k_shared_prefix.main([*arguments, "--base-url", base_url, *more])


def result(files):
    return msgspec.json.decode(files["--json"].read_bytes(), type=Report)


def hits_from_the_third_on(number, tokens):
    return (0, 20) if number >= 2 else (0, 0)


def test_figures_of_a_whole_run(files):
    with FakeVllm(hits=hits_from_the_third_on) as server:
        assert run(files, server.base_url, "--reset-local-cache") == 0
    assert server.calls.count("/reset_prefix_cache") == QUESTIONS
    arm = result(files).arms["server"]
    assert (arm.questions, arm.questions_hit, arm.correct) == (QUESTIONS, 4, 1)
    assert arm.hit_tokens == 80
    assert arm.query_tokens == sum(len(prompt.split()) for prompt in server.prompts)
    assert arm.questions_by_hit == {0: 2, 20: 4}
    assert arm.settings.past_prefix_tokens == [
        len(prompt.split()) - arm.settings.prefix_tokens for prompt in server.prompts
    ]
    assert arm.settings.dtype == "torch.float32"
    assert files["--json"].with_suffix(".png").stat().st_size > 10_000


def test_all_prompts_start_with_the_shots_and_nothing_more_in_common(files):
    with FakeVllm() as server:
        run(files, server.base_url)
    prefix = (
        "Question: What is 0 train?\nAnswer: It is.\n#### 0\n\n"
        "Question: What is 1 train?\nAnswer: It is.\n#### 1\n\n"
    )
    ends = [prompt.removeprefix(prefix) for prompt in server.prompts]
    assert ends == [
        f"Question: What is {n} test?\n{INSTRUCTION}\nAnswer:" for n in range(QUESTIONS)
    ]


def test_prompts_whose_own_tails_lie_on_the_junction_are_told(files, capsys):
    with FakeVllm() as server:
        assert run(files, server.base_url, "--instruction", "") == 0
    assert result(files).arms["server"].questions_with_own_tail == QUESTIONS
    printed = " ".join(capsys.readouterr().out.split())
    assert "WITHOUT an instruction" in printed
    assert "by luck" in printed


def test_a_run_goes_on_where_it_ended(files, capsys):
    with FakeVllm(fails_from=3) as server:
        assert run(files, server.base_url) == 1
    said = capsys.readouterr().err
    assert "engine died" in said
    assert "the same command goes on" in said
    with FakeVllm() as server:
        assert run(files, server.base_url) == 0
    # Two of the answered ones once more, for the store's sake, and three new ones.
    numbers = [prompt.split("What is ")[-1][0] for prompt in server.prompts]
    assert numbers == ["1", "2", "3", "4", "5"]
    said = " ".join(capsys.readouterr().out.split())
    assert "goes on after 3 questions" in said
    arm = result(files).arms["server"]
    assert [answer.index for answer in arm.answers] == list(range(QUESTIONS))
    assert arm.restarts == 1
    with FakeVllm() as server:
        assert run(files, server.base_url) == 0
    assert server.prompts == []


def journal(files):
    return gsm8k_shared_prefix.journal_path(files["--json"], "server")


def test_a_line_cut_at_the_end_is_asked_again(files, capsys):
    with FakeVllm() as server:
        run(files, server.base_url)
        whole = journal(files).read_bytes()
        journal(files).write_bytes(whole[:-9])
        server.prompts.clear()
        assert run(files, server.base_url) == 0
    assert "What is 5 test?" in server.prompts[-1]
    assert len(server.prompts) == 3
    assert "was cut" in " ".join(capsys.readouterr().out.split())
    assert result(files).arms["server"].questions == QUESTIONS


def test_a_damaged_line_is_named_and_nothing_is_lost(files, capsys):
    with FakeVllm() as server:
        run(files, server.base_url)
        lines = journal(files).read_bytes().splitlines(keepends=True)
        lines[2] = lines[2][:-9] + b"\n"
        journal(files).write_bytes(b"".join(lines))
        capsys.readouterr()
        assert run(files, server.base_url) == 1
    assert f"Line 3 of {journal(files)} is damaged" in capsys.readouterr().err
    assert journal(files).read_bytes() == b"".join(lines)


def test_answers_of_other_settings_are_not_mixed(files, capsys):
    with FakeVllm() as server:
        run(files, server.base_url)
        before = journal(files).read_bytes()
        capsys.readouterr()
        assert run({**files, "--shots": 1}, server.base_url) == 1
    assert "other settings (shots, prompts, prefix_tokens" in capsys.readouterr().err
    assert journal(files).read_bytes() == before


def test_again_reports_an_unfinished_run(files, capsys):
    with FakeVllm(fails_from=4) as server:
        run(files, server.base_url)
    out = str(files["--json"])
    assert gsm8k_shared_prefix.main(["--again", "--json", out]) == 0
    assert result(files).arms["server"].questions == 4


def test_several_at_a_time_are_counted_together(files):
    together = threading.Barrier(3, timeout=20)

    def answer(prompt):
        together.wait()
        return "#### 2"

    with FakeVllm(hits=hits_from_the_third_on, answer=answer) as server:
        assert run(files, server.base_url, "--concurrency", "3") == 0
    arm = result(files).arms["server"]
    assert (arm.questions_hit, arm.hit_tokens, arm.correct) == (None, 80, 1)
    assert arm.questions_by_hit == {}
    assert arm.query_tokens == sum(answer.prompt_tokens for answer in arm.answers)


def test_several_at_a_time_lose_nothing_when_the_server_dies(files):
    with FakeVllm(hits=hits_from_the_third_on, fails_from=4) as server:
        assert run(files, server.base_url, "--concurrency", "2") == 1
        server.fails_from = None
        assert run(files, server.base_url, "--concurrency", "2") == 0
    arm = result(files).arms["server"]
    # Two more for the warm-up, which nobody counts.
    assert len(server.prompts) == QUESTIONS + 2
    assert arm.questions == QUESTIONS
    assert arm.query_tokens == sum(answer.prompt_tokens for answer in arm.answers)


def test_compare_finds_what_differs(files, tmp_path, capsys):
    with FakeVllm() as server:
        run(files, server.base_url)
    other = {**files, "--json": tmp_path / "out" / "other.json"}
    with FakeVllm(
        hits=hits_from_the_third_on,
        answer=lambda prompt: (
            "#### 4" if "What is 4 test" in prompt else "so 3. #### 3"
        ),
    ) as server:
        capsys.readouterr()
        assert run(other, server.base_url, "--compare", str(files["--json"])) == 0
    ours, theirs = result(files).arms["server"], result(other).arms["server"]
    (comparison,) = gsm8k_shared_prefix.compared_to(result(other), result(files), "x")
    assert comparison.differing == comparison.differing_numbers == [4]
    assert comparison.accuracy_difference.value == pytest.approx(1 / QUESTIONS)
    assert comparison.hit_rates == (ours.hit_rate, theirs.hit_rate)
    assert "gsm8k: server -> server" in capsys.readouterr().out


def test_runs_with_other_prompts_are_not_compared(files, tmp_path, capsys):
    other = {**files, "--json": tmp_path / "other.json", "--shots": 1}
    with FakeVllm() as server:
        run(files, server.base_url)
        capsys.readouterr()
        assert run(other, server.base_url, "--compare", str(files["--json"])) == 1
    assert "asked other prompts" in capsys.readouterr().err
    # What was measured is there all the same.
    assert result(other).arms["server"].questions == QUESTIONS


def one_sentence(capsys):
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return next(line for line in said.splitlines() if line.startswith("gsm8k: "))


def test_no_server(files, capsys):
    assert run(files, f"http://127.0.0.1:{free_port()}") == 1
    assert "No server answers at" in one_sentence(capsys)


def test_wrong_model(files, capsys):
    with FakeVllm(model="gemma") as server:
        assert run(files, server.base_url, "--model", "llama") == 1
    assert "serves gemma, not llama" in one_sentence(capsys)


def test_no_metrics(files, capsys):
    with FakeVllm(metrics=False) as server:
        assert run(files, server.base_url) == 1
    assert "/metrics has no vllm:prefix_cache_queries" in one_sentence(capsys)
    assert server.prompts == []


def test_no_dev_mode(files, capsys):
    with FakeVllm(dev_mode=False) as server:
        assert run(files, server.base_url, "--reset-local-cache") == 1
        assert "VLLM_SERVER_DEV_MODE=1" in one_sentence(capsys)
        assert (
            run(
                {**files, "--json": files["--json"].with_name("b.json")},
                server.base_url,
            )
            == 0
        )


def test_somebody_elses_traffic(files, capsys):
    with FakeVllm(counts_extra=5) as server:
        assert run(files, server.base_url) == 1
    assert "others use the server" in one_sentence(capsys)


@pytest.mark.parametrize("which", ["--dataset", "--shots-from"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Cannot read the dataset"),
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b", "ans', "Line 2"),
        ('{"question": "a", "answer": "one"}', "without '#### NUMBER'"),
        ('{"question": "a", "answer": "#### 1"}', "has 1 examples, not"),
    ],
)
def test_unusable_data_sets(files, capsys, which, content, message):
    files[which].unlink()
    if content is not None:
        files[which].write_text(content)
    with FakeVllm() as server:
        assert run(files, server.base_url) == 1
    assert message in one_sentence(capsys)


def test_the_data_set_is_fetched_once(tmp_path, monkeypatch):
    class Files(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(data, "_SOURCE", f"http://127.0.0.1:{server.server_port}/d")
        path = data.fetched("test", tmp_path / "cache")
        server.shutdown()
    assert path.read_bytes() == b"/d/test.jsonl"
    assert data.fetched("test", tmp_path / "cache") == path
    with pytest.raises(ProbeError, match="give the data set's files with --dataset"):
        data.fetched("train", tmp_path / "cache")


@pytest.mark.parametrize("content", [None, b"{", b"[]"])
def test_nothing_to_compare_with(files, tmp_path, capsys, content):
    other = tmp_path / "other.json"
    if content is not None:
        other.write_bytes(content)
    with FakeVllm() as server:
        assert run(files, server.base_url, "--compare", str(other)) == 1
    assert "other.json" in one_sentence(capsys)


def test_again_without_answers(tmp_path, capsys):
    out = str(tmp_path / "none.json")
    assert gsm8k_shared_prefix.main(["--again", "--json", out]) == 1
    assert "There are no answers beside" in one_sentence(capsys)


def test_resets_and_concurrency_exclude_each_other(files, capsys):
    with pytest.raises(SystemExit):
        run(files, "http://x", "--reset-local-cache", "--concurrency", "2")
    assert "--concurrency 1" in capsys.readouterr().err


def test_bounds_where_all_are_alike():
    assert share_interval([False] * 200).high == pytest.approx(0.01828, abs=1e-4)
    assert share_interval([True] * 200).low == pytest.approx(1 - 0.01828, abs=1e-4)


def test_bootstrap_agrees_with_the_normal_interval():
    values = np.arange(1000) % 4 == 0
    interval = bootstrap(values.astype(float), "mean")
    half_width = 1.96 * np.sqrt(0.25 * 0.75 / 1000)
    assert interval.value == 0.25
    assert interval.low == pytest.approx(0.25 - half_width, abs=0.004)
    assert interval.high == pytest.approx(0.25 + half_width, abs=0.004)


def test_the_median_and_its_bounds():
    interval = bootstrap(np.array([1.0, 1.0, 1.0, 9.0, 1.0]), "median")
    assert (interval.value, interval.low) == (1.0, 1.0)


def test_arms_differ_in_the_store_alone():
    assert {name: arm.junctions for name, arm in ARMS.items()} == {
        "none": None,
        "stock": False,
        "junctions": True,
        "local": None,
    }
    assert not ARMS["local"].reset_local_cache

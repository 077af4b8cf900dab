# SPDX-License-Identifier: Apache-2.0
"""The probe against servers that it can and cannot probe."""

import json

from benchmarks import junction_probe
from testbed.processes import free_port


def _run(capsys, *args: str) -> tuple[int, str]:
    status = junction_probe.main(list(args))
    captured = capsys.readouterr()
    return status, " ".join((captured.out + captured.err).split())


def test_it_reports_hits_and_writes_json(trio, tmp_path, capsys):
    out = tmp_path / "probe.json"
    arguments = ["--base-url", trio["one"].base_url, "--json", str(out)]
    status, printed = _run(
        capsys, *arguments, "--prefix-tokens", "640", "--diverge", "8", "--seed", "3"
    )
    assert status == 0
    assert "Scheduler block 32 tokens, EAGLE/MTP off" in printed
    report = json.loads(out.read_text())
    hits = {row["name"]: row["store_hit_tokens"] for row in report["rows"]}
    assert hits == {"A": 0, "B": 0, "C": 640, "D": 640, "A again": 2016}
    assert not any(row["own_tail_on_junction"] for row in report["rows"])


def test_it_marks_siblings_that_hit_by_luck(trio, capsys):
    # 20 tokens past the shared ones: the replay tail lies within the prefix.
    status, printed = _run(
        capsys,
        *("--base-url", trio["one"].base_url, "--prefix-tokens", "640"),
        *("--diverge", "8", "--tail-tokens", "20", "--seed", "4"),
    )
    assert status == 0
    assert "own replay tail" in printed
    assert "by luck" in printed


def test_a_server_without_the_connector_is_named(trio, capsys):
    status, printed = _run(capsys, "--base-url", trio["cold"].base_url)
    assert status == 1
    assert "runs without MooncakeStoreConnector" in printed
    assert "vllm serve MODEL --kv-transfer-config" in printed


def test_a_server_that_is_not_there_is_named(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    status, printed = _run(capsys, "--base-url", url)
    assert status == 1
    assert f"No server answers at {url}" in printed


def test_prompts_longer_than_the_model_are_refused(trio, capsys):
    url = trio["one"].base_url
    status, printed = _run(capsys, "--base-url", url, "--prefix-tokens", "16000")
    assert status == 1
    assert "give a smaller --prefix-tokens" in printed

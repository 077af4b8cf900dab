# SPDX-License-Identifier: Apache-2.0
"""A fault of the recording costs the recording, and nothing else."""

from pathlib import Path

import pytest

from testbed.box import Box, EngineOptions, Side
from tests.engine.layouts import FULL_SWA, siblings
from vllm.junctions.record.connector import Recorder


@pytest.mark.parametrize(
    ("method", "side"), [("allocated", "on"), ("step", "off"), ("finished", "on")]
)
def test_requests_are_served_when_the_recorder_fails(
    method: str, side: Side, tmp_path: Path, monkeypatch, caplog
) -> None:
    def fail(*args: object) -> None:
        raise AttributeError("a vLLM of tomorrow")

    monkeypatch.setattr(Recorder, method, fail)
    prompts, _ = siblings(FULL_SWA)
    path = tmp_path / "traffic.jsonl"
    options = EngineOptions(side=side, extra_config={"junctions_record": str(path)})
    with Box(FULL_SWA, options) as box:
        engine = box.engine()
        served = [engine.serve(prompt, str(i)) for i, prompt in enumerate(prompts)]
    assert {one.finish_reason for one in served} == {"length"}
    assert caplog.text.count("stops recording traffic") == 1
    assert path.read_text().count("\n") == 1

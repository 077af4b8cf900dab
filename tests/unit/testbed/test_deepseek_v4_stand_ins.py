# SPDX-License-Identifier: Apache-2.0
"""vLLM's own functions, with the stand-ins under them, against the reference.

In a process of its own: vLLM cannot take a kernel back.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from testbed.models import DEEPSEEK_V4, GEMMA3
from tests import deepseek_v4_reference as reference
from tests.deepseek_v4_reference import Batch

_REPOSITORY = Path(__file__).parents[3]
_BATCH = (3, 3, 200)
_NEEDS_BF16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="processor without AVX512_BF16"
)


@pytest.fixture(scope="module")
def through_vllm() -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tests.deepseek_v4_reference", *map(str, _BATCH)],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@_NEEDS_BF16
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("requests", reference.requests(Batch.random(*_BATCH))),
        ("compressed_slots", reference.compressed_slots(Batch.random(*_BATCH), 64, 4)),
        ("window_slots", reference.window_slots(Batch.random(*_BATCH), 128, 64)),
        ("gather_lens", reference.gather_lens(Batch.random(*_BATCH), 0, 128)),
        (
            "scored_states",
            [list(row) for row in reference.scored_states(Batch.random(*_BATCH), 4)],
        ),
        ("request_of_state", reference.request_of_state(Batch.random(*_BATCH), 4)),
        ("tile_plans", ["c128a", "c1a", "c2a", "c4a", "swaonly"]),
    ],
)
def test_vllm_gets_the_reference_values(through_vllm, name, expected):
    assert through_vllm[name] == expected


def test_the_plugin_is_found_on_the_path_of_its_server_alone(tmp_path):
    env = DEEPSEEK_V4.env(tmp_path)
    on_path = env["PYTHONPATH"].split(os.pathsep)
    (found,) = (
        entry_point
        for distribution in distributions(path=[on_path[0]])
        for entry_point in distribution.entry_points
    )
    assert found.group == "vllm.general_plugins"
    assert found.value == DEEPSEEK_V4.plugin
    assert callable(found.load())
    assert str(_REPOSITORY) in on_path


def test_other_models_load_no_plugin(tmp_path):
    assert GEMMA3.env(tmp_path) == {}

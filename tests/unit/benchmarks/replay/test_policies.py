# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmarks.replay.policies import policies


def test_what_others_are_measured_against_comes_first():
    names = [policy.name for policy in policies([8192, 1024, 1024], 256, [1])]
    assert names == [
        *("ceiling", "dense", "stock", "junctions"),
        *("every-1024", "every-8192"),
        *("junctions+every-1024", "junctions+every-8192"),
        "junctions+predict-1",
    ]


@pytest.mark.parametrize("interval", [0, 100, 300])
def test_an_interval_that_vllm_would_refuse_is_refused(interval):
    with pytest.raises(ValueError, match=f"{interval} tokens is no positive multiple"):
        policies([interval], 256)

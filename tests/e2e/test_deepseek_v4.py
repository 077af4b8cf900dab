# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 itself: real model code and kernels, real server, real store."""

from collections.abc import Iterator

import pytest
import torch

from testbed.models import DEEPSEEK_V4
from testbed.server import VllmServer, serving
from testbed.store import MooncakeMaster, StoreClient
from tests.e2e.client import ask, ask_cold, random_prompts, reset_local_cache

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="vLLM's DeepSeek-V4 kernels need a processor with AVX512_BF16",
)

# One bfloat16 step of a log probability of about -4.
_LOGPROB_TOLERANCE = 0.016


@pytest.fixture(scope="module")
def pair(master, tmp_path_factory) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Two instances that share the store; what one stores the other loads."""
    config = master.write_client_config()
    servers = []
    for _ in range(2):
        work_dir = tmp_path_factory.mktemp("deepseek-v4")
        server = VllmServer(
            DEEPSEEK_V4.write(work_dir),
            work_dir,
            mooncake_config=config,
            # Two instances whose threads wait for each other's cores are slow.
            env={
                **DEEPSEEK_V4.env(work_dir),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
            },
        )
        servers.append(server)
    with serving(*servers):
        yield tuple(servers)


def _store_prefix(
    server: VllmServer, master: MooncakeMaster, first: list[int], second: list[int]
) -> None:
    """Let two siblings meet on ``server``: the second finds and keeps the junction."""
    for prompt in (first, second):
        assert ask(server, prompt, max_tokens=1).store_hit_tokens == 0
        reset_local_cache(server)
    master.wait_until_still()


@pytest.mark.slow
@pytest.mark.parametrize("diverge_tokens", [8, 160])
def test_siblings_on_a_fresh_instance_answer_as_if_nothing_had_been_loaded(
    pair, master, diverge_tokens
):
    writer, reader = pair
    first, second, *siblings = random_prompts(
        f"deepseek-v4-{diverge_tokens}", 3840 + diverge_tokens, 1400, 607, 614, 621
    )
    _store_prefix(writer, master, first, second)
    for sibling in siblings:
        loaded = ask(reader, sibling)
        assert (loaded.local_hit_tokens, loaded.store_hit_tokens) == (0, 3840)
        reset_local_cache(reader)
        cold = ask_cold(reader, sibling)
        assert loaded.token_ids == cold.token_ids
        assert loaded.logprobs == pytest.approx(cold.logprobs, abs=_LOGPROB_TOLERANCE)


@pytest.mark.slow
def test_wrong_values_in_any_group_would_show_in_the_answer(pair, master):
    """What the equality above rests on: the answer depends on what is loaded."""
    writer, reader = pair
    prompts = random_prompts("deepseek-v4-wrong", 1032, 800, 607, *range(614, 649, 7))
    with StoreClient(master) as client:
        before = master.keys()
        _store_prefix(writer, master, *prompts[:2])
        stored = master.keys() - before
        # Group 4 keeps what the 128-to-1 compressor saw since its last state; a
        # junction is a multiple of 256, where that is nothing.
        for group, sibling in enumerate(prompts[2:6]):
            values = {
                key: client.get(key) for key in stored if f"@group:{group}@" in key
            }
            assert values
            for key, value in values.items():
                client.overwrite(key, bytes(len(value)))
            loaded = ask(reader, sibling)
            for key, value in values.items():
                client.overwrite(key, value)
            assert loaded.store_hit_tokens == 1024
            reset_local_cache(reader)
            assert loaded.logprobs != pytest.approx(
                ask_cold(reader, sibling).logprobs, abs=_LOGPROB_TOLERANCE
            ), f"group {group}"
        unharmed = ask(reader, prompts[6])
        reset_local_cache(reader)
        assert unharmed.store_hit_tokens == 1024
        assert unharmed.token_ids == ask_cold(reader, prompts[6]).token_ids

# SPDX-License-Identifier: Apache-2.0
"""Prompts of token ids, and what a server makes of them."""

import os
import random
import uuid
from dataclasses import dataclass, replace
from typing import Any

import httpx

from benchmarks.junction_probe import ServerUnderProbe
from testbed.server import VllmServer

REPETITION_VARIABLE = "JUNCTIONS_E2E_REPETITION"


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their log probabilities, and the hits in tokens."""

    token_ids: list[int]
    logprobs: list[float]
    local_hit_tokens: int = 0
    store_hit_tokens: int = 0


def random_prompts(seed: str, shared_tokens: int, *tail_tokens: int) -> list[list[int]]:
    """Return prompts that share their first tokens and nothing after them."""
    # A repeated test needs prompts that the store has not seen.
    rng = random.Random(seed + os.environ.get(REPETITION_VARIABLE, ""))
    shared = [rng.randrange(100, 1000) for _ in range(shared_tokens)]
    return [
        shared + [rng.randrange(100, 1000) for _ in range(count)]
        for count in tail_tokens
    ]


def ask(
    server: VllmServer,
    prompt: list[int],
    max_tokens: int = 8,
    cache_salt: str | None = None,
    kv_transfer_params: dict[str, Any] | None = None,
) -> Answer:
    """Send a prompt alone; return its answer and what it hit.

    With a salt that no request used before, a prompt hits nothing.
    """
    probe = ServerUnderProbe(server.base_url)
    before = probe.counters()
    answer = complete(server, prompt, max_tokens, cache_salt, kv_transfer_params)
    local, store = probe.hits_since(before, len(prompt))
    return replace(answer, local_hit_tokens=local, store_hit_tokens=store)


def complete(
    server: VllmServer,
    prompt: list[int],
    max_tokens: int = 8,
    cache_salt: str | None = None,
    kv_transfer_params: dict[str, Any] | None = None,
) -> Answer:
    """Send a prompt; return its answer, whose hits stay 0.

    For requests that are looked up more than once: the server's counters then count
    every time, so what was hit in the end cannot be told.
    """
    optional = {"cache_salt": cache_salt, "kv_transfer_params": kv_transfer_params}
    reply = httpx.post(
        f"{server.base_url}/v1/completions",
        json={
            "model": server.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            # Servers of the test bed have no tokenizer.
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            **{name: value for name, value in optional.items() if value is not None},
        },
        timeout=300,
    )
    assert reply.is_success, f"{reply.elapsed}: {reply.status_code} {reply.text}"
    choice = reply.json()["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def ask_cold(server: VllmServer, prompt: list[int], max_tokens: int = 8) -> Answer:
    """Send a prompt such that it can hit nothing; return its answer."""
    answer = ask(server, prompt, max_tokens, cache_salt=uuid.uuid4().hex)
    assert (answer.local_hit_tokens, answer.store_hit_tokens) == (0, 0)
    return answer


def reset_local_cache(server: VllmServer) -> None:
    """Wait until all saves have landed, then forget what is cached locally."""
    ServerUnderProbe(server.base_url).reset_local_cache()

# SPDX-License-Identifier: Apache-2.0
"""Is an answer what a cold server gives? A rule that near-ties cannot upset."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

# Between what float32 sums in other chunk shapes differ by and what one wrong block
# does; tests/README.md has both as measured.
LOGPROB_TOLERANCE = 1e-5


def completion_body(model: str, prompt: Sequence[int], max_tokens: int) -> dict:
    """Return a greedy completion request that generates exactly ``max_tokens``."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        # Servers of the test bed have no tokenizer.
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }


def logprob_error(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    cold: Sequence[Mapping[str, Mapping[str, Any]]],
) -> float:
    """Return how far an answer is from a cold server's, as a log probability.

    ``cold[i]`` is what a server without any cache says of the token at ``i``, given
    the same tokens before it: candidates by token id, the chosen one and the best
    among them. So each token is judged on its own, and a near-tie that falls the
    other way changes nothing for those behind it. The error of a token is the
    larger of two: how much its log probability differs, and how far the cold server
    prefers another token. The answer's is that of its worst token.

    A token given -1.5 where the cold server says -1.6, and -1.1 of its favourite,
    has an error of 0.5.
    """
    worst = 0.0
    for token_id, logprob, candidates in zip(token_ids, logprobs, cold, strict=True):
        by_id = {name: entry["logprob"] for name, entry in candidates.items()}
        chosen = by_id[str(token_id)]
        worst = max(worst, abs(logprob - chosen), max(by_id.values()) - chosen)
    return worst


def cold_body(model: str, prompt: Sequence[int], token_ids: Sequence[int]) -> dict:
    """Return the request that makes a server judge an answer's tokens.

    Prompt log probabilities need every position computed, so no cache serves it.
    """
    return {
        **completion_body(model, [*prompt, *token_ids], 1),
        "prompt_logprobs": 1,
    }


def cold_candidates(reply: httpx.Response, num_tokens: int) -> list[dict[str, Any]]:
    """Return ``cold`` of :func:`logprob_error` from the reply to a cold request."""
    return reply.json()["choices"][0]["prompt_logprobs"][-num_tokens:]

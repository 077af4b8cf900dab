# SPDX-License-Identifier: Apache-2.0
"""Requests as vLLM's front end hands them to a scheduler."""

from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request


def make_request(
    prompt: list[int],
    request_id: str,
    max_tokens: int,
    block_hasher: Callable[[Request], list[Any]],
    *,
    prompt_logprobs: int | None = None,
    kv_transfer_params: dict[str, Any] | None = None,
    **fields: Any,
) -> Request:
    """Return a greedy request; ``fields`` are further ones of ``Request``."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        prompt_logprobs=prompt_logprobs,
    )
    if kv_transfer_params is not None:
        # Where vLLM's front end puts them.
        params.extra_args = {"kv_transfer_params": kv_transfer_params}
    params.update_from_generation_config({}, 2)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        block_hasher=block_hasher,
        **fields,
    )

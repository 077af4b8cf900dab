# SPDX-License-Identifier: Apache-2.0
"""Names of stored values, as servers compute them."""

import os

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request


def block_hashes(prompt: list[int], block_tokens: int) -> list[str]:
    """Return the hash that keys each full block of a prompt, in order."""
    hash_fn = get_hash_fn_by_name("sha256")
    assert os.environ["PYTHONHASHSEED"] == "0"
    init_none_hash(hash_fn)
    request = Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_tokens, hash_fn),
    )
    return [block_hash.hex() for block_hash in request.block_hashes]


def group_of(key: str) -> str:
    """Return the id of the KV-cache group that a key belongs to."""
    return key.split("@group:")[1].split("@")[0]

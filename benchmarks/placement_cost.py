# SPDX-License-Identifier: Apache-2.0
"""What finding places for predicted tails costs a request.

Requests of 131,072 tokens in scheduler blocks of 256, with distances all over the
range learned, so that the choice is as wide as it gets. ``make bench-placement`` runs
it. Times are of the thread alone; other work on the machine still shows, since it
takes caches and clock away.
"""

import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import median

import numpy as np
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

from vllm.junctions.rules.placement import MAX_TAILS, FinishedLookup, TailPlacement

NUM_TOKENS = 131_072
BLOCK_TOKENS = 256
NUM_REQUESTS = 1_000


def requests(rng: random.Random) -> Iterator[FinishedLookup]:
    """Every other one new, every other one a sibling of the one before it."""
    num_blocks = NUM_TOKENS // BLOCK_TOKENS
    while True:
        first = [rng.randbytes(32) for _ in range(num_blocks)]
        yield FinishedLookup(NUM_TOKENS, 0, (), _key(first))
        num_shared = rng.randrange(1, num_blocks)
        sibling = first[:num_shared]
        sibling += [rng.randbytes(32) for _ in range(num_blocks - num_shared)]
        yield FinishedLookup(NUM_TOKENS, 0, (num_shared * BLOCK_TOKENS,), _key(sibling))


def _key(hashes: list[bytes]) -> Callable[[int], bytes]:
    return lambda num_tokens: hashes[num_tokens // BLOCK_TOKENS - 1]


def measure(max_tails: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each request's microseconds, and whether it got tails."""
    placement = TailPlacement(max_tails, BLOCK_TOKENS, use_eagle=False)
    taken_us, has_tails = [], []
    for lookup in islice(requests(random.Random(0)), NUM_REQUESTS):
        start = time.thread_time()
        placement.observe(lookup)
        tails = placement.place(lookup)
        taken_us.append((time.thread_time() - start) * 1e6)
        has_tails.append(bool(tails))
    return np.array(taken_us), np.array(has_tails)


def measure_hashing() -> float:
    """Return the microseconds of what vLLM does for each request anyway, median."""
    init_none_hash(sha256)
    tokens = list(range(BLOCK_TOKENS))
    taken_us = []
    for _ in range(20):
        start = time.thread_time()
        parent = None
        for _ in range(NUM_TOKENS // BLOCK_TOKENS):
            parent = hash_block_tokens(sha256, parent, tokens)
        taken_us.append((time.thread_time() - start) * 1e6)
    return median(taken_us)


def describe(taken_us: np.ndarray) -> str:
    low, middle, high = np.percentile(taken_us, [10, 50, 90])
    return (
        f"median {middle:.0f} us, mean {taken_us.mean():.0f} "
        f"(10 %: {low:.0f}, 90 %: {high:.0f})"
    )


def main() -> None:
    hashing_us = measure_hashing()
    print(f"hashing the blocks of {NUM_TOKENS:,} tokens: {hashing_us:.0f} us")
    for max_tails in range(1, MAX_TAILS + 1):
        taken_us, has_tails = measure(max_tails)
        print(
            f"up to {max_tails} predicted tails: all {NUM_REQUESTS:,} requests "
            f"{describe(taken_us)}; the {has_tails.sum()} that got tails "
            f"{describe(taken_us[has_tails])}"
        )


if __name__ == "__main__":
    main()

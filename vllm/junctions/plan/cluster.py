# SPDX-License-Identifier: Apache-2.0
"""What prompts are replayed on, and what becomes of them."""

from dataclasses import dataclass
from typing import Literal

Router = Literal["round-robin", "sticky"]

# 8 bytes each, and what a tree takes beside them.
MAX_UNITS = 120_000_000


@dataclass(frozen=True)
class Cluster:
    """What a trace is replayed on.

    Attributes:
        num_instances: vLLM instances that share the store.
        router: Who gets a prompt whose instance is not known: the next one, or always
            the same one for prompts that begin with the same block.
        local_blocks: Blocks of each instance's own prefix cache; 0 for none.
        store_blocks: Blocks that the store holds; None is no bound.
        max_units: Pieces of prompts to remember, where nothing else is a bound.
    """

    num_instances: int = 1
    router: Router = "round-robin"
    local_blocks: int = 0
    store_blocks: int | None = None
    max_units: int = MAX_UNITS


@dataclass
class Outcome:
    """What became of the prompts under one policy. Blocks are of one rank.

    Attributes:
        hit_tokens: What did not have to be computed.
        store_hit_tokens: How much of that was loaded from the store.
        num_hits: Requests that hit anything.
        num_zero_hits: Requests that hit under the first policy, and nothing here.
        num_junction_requests: Requests for which the store reported a junction.
        num_puts: Blocks stored.
        num_tail_puts: Those of groups other than full attention.
        num_predicted_tails: Predicted tails placed.
        num_predicted_served: Requests that hit one, and nothing as long without.
        placement_seconds: What prediction took, all together.
        num_evicted: Blocks that the store had to let go.
        num_stored: Blocks in the store at the end.
    """

    hit_tokens: int = 0
    store_hit_tokens: int = 0
    num_hits: int = 0
    num_zero_hits: int = 0
    num_junction_requests: int = 0
    num_puts: int = 0
    num_tail_puts: int = 0
    num_predicted_tails: int = 0
    num_predicted_served: int = 0
    placement_seconds: float = 0.0
    num_evicted: int = 0
    num_stored: int = 0


@dataclass(frozen=True)
class Served:
    """What one prompt hit, by policy, in tokens."""

    hit_tokens: list[int]
    store_hit_tokens: list[int]

# SPDX-License-Identifier: Apache-2.0
"""What ``make demo`` writes, whichever model it ran."""

from pathlib import Path

import msgspec

RESULTS = Path(__file__).parent / "results"


class DemoRow(msgspec.Struct, frozen=True):
    """One request of one side. Lengths in tokens, times in seconds."""

    name: str
    diverge_tokens: int
    prompt_tokens: int
    local_hit_tokens: int
    store_hit_tokens: int
    ttft_seconds: float


class DemoResult(msgspec.Struct, frozen=True):
    """Both sides, as ``results/demo.json`` holds them."""

    stock: list[DemoRow]
    junctions: list[DemoRow]

# SPDX-License-Identifier: Apache-2.0
"""The seed table: where siblings hit on DeepSeek-V4's cache layout with MTP.

Runs vLLM's real scheduler and the real connector without a model (see
``testbed/box``), stock and with junctions, and checks the numbers.
``make demo MODEL=seed-table`` prints it.
"""

import argparse
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.demo_result import RESULTS, DemoResult, DemoRow
from testbed.box import Box, EngineOptions, Group, Layout, Side

SUMMARY = "DeepSeek-V4's cache layout with MTP, real scheduler, no model"

LAYOUT = Layout(
    groups=(
        Group("mla", 256),
        Group("swa_mla", 64, 128),
        Group("swa_mla", 64, 128, eagle=True),
        Group("swa_mla", 4, 8),
        Group("swa_mla", 8, 128),
    ),
    hash_tokens=4,
    drops_eagle_block=True,
)
PREFIX_TOKENS = 3840
FIRST_TAIL_TOKENS = 1400
TAIL_TOKENS = 600
LUCKY_TAIL_TOKENS = 200
# (tokens shared past the prefix, where siblings should hit, where A again should)
EXPECTED = ((8, 3584, 4864), (160, 3840, 5120))
_SIDES: dict[str, Side] = {"stock": "stock", "junctions": "on"}
_SIBLINGS = ("B", "C", "D")


@dataclass(frozen=True)
class Series:
    """One run of A, its siblings and A again.

    Attributes:
        tail_tokens: Tokens of the first sibling past the shared ones.
        diverge_tokens: Tokens shared past the prefix.
        rows: The requests, by side.
    """

    tail_tokens: int
    diverge_tokens: int
    rows: dict[str, list[DemoRow]]


def build_prompts(diverge_tokens: int, tail_tokens: int) -> dict[str, list[int]]:
    """Return the prompts by name, as token ids."""
    rng = random.Random(diverge_tokens)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, 1000) for _ in range(count)]

    shared = ids(PREFIX_TOKENS + diverge_tokens)
    prompts = {"A": shared + ids(FIRST_TAIL_TOKENS)}
    for index, name in enumerate(_SIBLINGS):
        # A little more each, so that no two replay tails coincide by design.
        prompts[name] = shared + ids(tail_tokens + 7 * index)
    return prompts


def run_side(
    side: Side,
    diverge_tokens: int,
    tail_tokens: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> list[DemoRow]:
    """Serve all requests on one instance with a store of its own.

    Args:
        side: Which connector it runs.
        diverge_tokens: Tokens shared past the prefix.
        tail_tokens: Tokens of the first sibling past the shared ones.
        settings: Further keys of ``kv_connector_extra_config``.
    """
    prompts = build_prompts(diverge_tokens, tail_tokens)
    rows = []
    options = EngineOptions(side=side, extra_config=dict(settings))
    with Box(LAYOUT, options) as box:
        engine = box.engine()
        for name in (*prompts, "A again"):
            prompt = prompts[name.removesuffix(" again")]
            engine.reset_local_cache()
            start = time.perf_counter()
            served = engine.serve(prompt, name)
            rows.append(
                DemoRow(
                    name=name,
                    diverge_tokens=diverge_tokens,
                    prompt_tokens=len(prompt),
                    local_hit_tokens=served.local_hit_tokens,
                    store_hit_tokens=served.store_hit_tokens,
                    ttft_seconds=time.perf_counter() - start,
                )
            )
        faults = box.faults()
        assert not faults, faults
    return rows


def run_series(diverge_tokens: int, tail_tokens: int) -> Series:
    rows = {
        name: run_side(side, diverge_tokens, tail_tokens)
        for name, side in _SIDES.items()
    }
    return Series(tail_tokens, diverge_tokens, rows)


def expected_hits(series: Series, side: str) -> dict[str, int]:
    """Return where each request should hit, in tokens."""
    sibling, again = next(
        row[1:] for row in EXPECTED if row[0] == series.diverge_tokens
    )
    hits = series.tail_tokens == LUCKY_TAIL_TOKENS or side == "junctions"
    later = sibling if hits else 0
    return {"A": 0, "B": 0, "C": later, "D": later, "A again": again}


def failures(table: list[Series]) -> list[str]:
    """Say in words which number differs; empty when the table is as it should be."""
    found = []
    for series in table:
        for side, rows in series.rows.items():
            expected = expected_hits(series, side)
            found += [
                f"{side}: {row.name} (d={row.diverge_tokens}, tails of "
                f"{series.tail_tokens}) hit {row.store_hit_tokens}, not "
                f"{expected[row.name]}"
                for row in rows
                if row.store_hit_tokens != expected[row.name] or row.local_hit_tokens
            ]
    return found


def print_table(table: list[Series], console: Console) -> None:
    """Print all series in one table, and what they mean."""
    view = Table(title=f"Tokens loaded from the store: {SUMMARY}")
    for column in ("sibling tail", "d", "request", "prompt", "stock", "junctions"):
        view.add_column(column, justify="right")
    view.add_column("")
    for series in table:
        lucky = series.tail_tokens == LUCKY_TAIL_TOKENS
        for stock, ours in zip(*series.rows.values(), strict=True):
            view.add_row(
                str(series.tail_tokens),
                str(stock.diverge_tokens),
                stock.name,
                str(stock.prompt_tokens),
                str(stock.store_hit_tokens),
                str(ours.store_hit_tokens),
                "by luck" if lucky and stock.name in "CD" else "",
            )
        view.add_section()
    console.print(view)
    block = LAYOUT.scheduler_block_tokens
    console.print(
        f"A is a prefix of {PREFIX_TOKENS} tokens, d more that siblings share, and "
        f"{FIRST_TAIL_TOKENS} of its own. The local cache is reset before each "
        f"request. Blocks of {block} tokens with MTP: a sibling that shares 8 tokens "
        "past the prefix cannot prove the block above it and lands one block lower, "
        "one that shares 160 proves it.\n"
        f"Tails of {LUCKY_TAIL_TOKENS} tokens end less than two scheduler blocks past "
        "the shared prefix: the sibling's own replay tail lies on the junction, so "
        "stock hits from the next sibling on. That is luck, not reuse: with tails of "
        f"{TAIL_TOKENS} it is gone.",
        soft_wrap=False,
    )


def run(json_path: Path, console: Console | None = None) -> int:
    """Run all series, print, check and write the result; return an exit status."""
    console = console or Console()
    table = [
        run_series(diverge_tokens, tail_tokens)
        for tail_tokens in (TAIL_TOKENS, LUCKY_TAIL_TOKENS)
        for diverge_tokens, *_ in EXPECTED
    ]
    print_table(table, console)
    # The lucky rows are no comparison, so they stay out of the result.
    plain = [series for series in table if series.tail_tokens == TAIL_TOKENS]
    result = DemoResult(
        **{side: [row for s in plain for row in s.rows[side]] for side in _SIDES}
    )
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    console.print(f"Written to {json_path}")
    problems = failures(table)
    for problem in problems:
        console.print(f"[bold red]NOT AS EXPECTED:[/] {problem}")
    return 1 if problems else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "demo.json")
    return run(parser.parse_args(argv).json)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""How much sooner does a sibling's first token come, by length of the shared prefix?

For each length a family of prompts shares a prefix of that many tokens: A is the
first, B finds the junction, and the third sibling on loads the prefix from the store.
The same family goes to a stock server and to one with junctions, request by request
in turn, and the local prefix cache is reset before each.

Here, with stores and servers of its own (``make bench-ttft``):

    python -m benchmarks.ttft_speedup

Against two running servers that differ in the ``junctions`` setting alone:

    python -m benchmarks.ttft_speedup --stock-url URL --junctions-url URL
"""

import argparse
import contextlib
import os
import platform
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.command_line import exit_on_signal, positive
from benchmarks.junction_probe import ProbeError, ServerFacts, ServerUnderProbe
from testbed import gemma3_270m
from testbed.models import GEMMA3
from testbed.processes import ProcessFailed
from testbed.server import VllmServer
from testbed.store import MooncakeMaster

SCHEMA_VERSION = 1
RESULTS = Path(__file__).parent / "results"
SIDES = {"stock": False, "junctions": True}
_LENGTHS = [1024, 2048, 4096, 8192, 15360]
# A and B; every further request is one to measure.
_FIRST_TO_HIT = 2
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 100, 999
_LOG_SECONDS = 1.0
_LOADED = re.compile(r"load_get_total_bytes=(\d+)")


class Sample(msgspec.Struct, frozen=True):
    """One request to one server. ``position`` is 0 for A, 1 for B, and so on."""

    side: str
    prefix_tokens: int
    position: int
    prompt_tokens: int
    store_hit_tokens: int
    ttft_seconds: float


class LengthResult(msgspec.Struct, frozen=True):
    """Both sides at one length; times are medians over the third sibling on.

    Attributes:
        ratio: Stock's time by junctions': above 1 junctions are faster.
        ratio_range: Least and greatest ratio of a single pair of requests.
        first_sibling_ratio: The same for B, which pays in full on both sides.
        loaded_bytes: Loaded from the store per hitting sibling; None: the server's
            log is not at hand.
    """

    prefix_tokens: int
    prompt_tokens: int
    stock_hit_tokens: int
    junctions_hit_tokens: int
    stock_ttft_seconds: float
    junctions_ttft_seconds: float
    ratio: float
    ratio_range: tuple[float, float]
    first_sibling_ratio: float
    loaded_bytes: int | None


class TtftReport(msgspec.Struct, frozen=True):
    """What ``results/ttft.json`` holds."""

    schema_version: int
    date: str
    machine: str
    model: str
    vllm_version: str
    scheduler_block_tokens: int
    tail_tokens: int
    siblings: int
    lengths: list[LengthResult]
    samples: list[Sample]


@dataclass(frozen=True)
class Side:
    """One of the two servers; ``log_path`` tells the bytes that it loaded."""

    server: ServerUnderProbe
    facts: ServerFacts
    log_path: Path | None = None

    def loaded_bytes(self) -> int | None:
        """Return the bytes loaded from the store so far."""
        if self.log_path is None:
            return None
        # The log is written once per interval, a little late.
        time.sleep(3 * _LOG_SECONDS)
        log = self.log_path.read_text(errors="replace")
        return sum(int(found[1]) for found in _LOADED.finditer(log))


def family(
    seed: int, prefix_tokens: int, siblings: int, tail_tokens: int
) -> list[list[int]]:
    """Return the prompts of a family as token ids: A first, then its siblings.

    Their tails differ from the first token on, and are a little longer each time, so
    that no two replay tails coincide by design.
    """
    rng = random.Random(f"{seed}/{prefix_tokens}")

    def ids(count: int) -> list[int]:
        return [rng.randint(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(count)]

    shared = ids(prefix_tokens)
    starts = rng.sample(range(_FIRST_TOKEN_ID, _LAST_TOKEN_ID + 1), siblings + 1)
    return [
        [*shared, start, *ids(tail_tokens - 1 + 7 * number)]
        for number, start in enumerate(starts)
    ]


def measure_length(
    sides: dict[str, Side], prompts: list[list[int]], prefix_tokens: int
) -> list[Sample]:
    """Send a family to both sides, request by request in turn.

    Raises:
        ProbeError: A server cannot go on.
    """
    samples = []
    for position, prompt in enumerate(prompts):
        # In turn first, so that neither side always comes after the other's saves.
        order = list(sides) if position % 2 else list(reversed(sides))
        for name in order:
            sides[name].server.reset_local_cache()
        for name in order:
            side = sides[name]
            _, store, seconds = side.server.measured(side.facts.model, prompt)
            samples.append(
                Sample(name, prefix_tokens, position, len(prompt), store, seconds)
            )
    for side in sides.values():
        side.server.reset_local_cache()
    return samples


def summarise(samples: list[Sample], loaded_bytes: int | None) -> LengthResult:
    """Return one length's figures.

    Args:
        loaded_bytes: Of the junctions side, over all samples.
    """

    def of(name: str, positions: range) -> list[Sample]:
        chosen = [s for s in samples if s.side == name and s.position in positions]
        return sorted(chosen, key=lambda sample: sample.position)

    late = range(_FIRST_TO_HIT, 1 + max(sample.position for sample in samples))
    stock, ours = of("stock", late), of("junctions", late)
    pairs = [a.ttft_seconds / b.ttft_seconds for a, b in zip(stock, ours, strict=True)]
    (stock_b,), (ours_b,) = of("stock", range(1, 2)), of("junctions", range(1, 2))
    stock_seconds = statistics.median(sample.ttft_seconds for sample in stock)
    ours_seconds = statistics.median(sample.ttft_seconds for sample in ours)
    hits = sum(bool(s.store_hit_tokens) for s in samples if s.side == "junctions")
    return LengthResult(
        prefix_tokens=samples[0].prefix_tokens,
        prompt_tokens=stock[0].prompt_tokens,
        stock_hit_tokens=max(sample.store_hit_tokens for sample in stock),
        junctions_hit_tokens=min(sample.store_hit_tokens for sample in ours),
        stock_ttft_seconds=stock_seconds,
        junctions_ttft_seconds=ours_seconds,
        ratio=stock_seconds / ours_seconds,
        ratio_range=(min(pairs), max(pairs)),
        first_sibling_ratio=stock_b.ttft_seconds / ours_b.ttft_seconds,
        loaded_bytes=None if loaded_bytes is None else loaded_bytes // max(hits, 1),
    )


def run(args: argparse.Namespace, sides: dict[str, Side]) -> TtftReport:
    """Measure all lengths.

    Raises:
        ProbeError: A server cannot be measured, or the two are not comparable.
    """
    facts = check_sides(sides)
    block_tokens = args.block_tokens or facts.block_tokens
    tail_tokens = args.tail_tokens or 2 * block_tokens + 24
    longest = max(args.lengths) + tail_tokens + 7 * args.siblings
    if longest >= facts.max_model_tokens:
        raise ProbeError(
            f"The longest prompt has {longest} tokens, the servers take "
            f"{facts.max_model_tokens}; give smaller --lengths"
        )
    samples: list[Sample] = []
    lengths: list[LengthResult] = []
    for server in (side.server for side in sides.values()):
        # The first request of a server pays for what is set up lazily.
        server.first_token_seconds(facts.model, family(-1, max(args.lengths), 1, 64)[0])
    bar = tqdm(sorted(args.lengths), desc="TTFT by prefix length", unit="length")
    for prefix_tokens in bar:
        before = sides["junctions"].loaded_bytes()
        prompts = family(args.seed, prefix_tokens, args.siblings, tail_tokens)
        samples += (here := measure_length(sides, prompts, prefix_tokens))
        after = sides["junctions"].loaded_bytes()
        loaded = None if before is None or after is None else after - before
        lengths.append(summarise(here, loaded))
        # On disk at once: a run that ends early loses nothing.
        report = TtftReport(
            schema_version=SCHEMA_VERSION,
            date=datetime.now(UTC).date().isoformat(),
            machine=f"{platform.machine()}, {os.cpu_count()} cores",
            model=facts.model,
            vllm_version=facts.vllm_version,
            scheduler_block_tokens=block_tokens,
            tail_tokens=tail_tokens,
            siblings=args.siblings,
            lengths=lengths,
            samples=samples,
        )
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


def check_sides(sides: dict[str, Side]) -> ServerFacts:
    """Return what both servers have in common.

    Raises:
        ProbeError: They serve different models or versions.
    """
    stock, ours = sides["stock"].facts, sides["junctions"].facts
    if stock != ours:
        raise ProbeError(f"The two servers differ: {stock} against {ours}")
    return ours


@contextlib.contextmanager
def running_sides(
    args: argparse.Namespace, work_dir: Path
) -> Iterator[dict[str, Side]]:
    """Give the two servers: those that run, or own ones.

    Raises:
        ProbeError, ProcessFailed: One does not run.
    """
    if args.stock_url:
        urls = {"stock": args.stock_url, "junctions": args.junctions_url}
        servers = {name: ServerUnderProbe(url) for name, url in urls.items()}
        yield {name: Side(server, server.facts()) for name, server in servers.items()}
        return
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, junctions in SIDES.items():
            side_dir = work_dir / name
            master = stack.enter_context(MooncakeMaster(side_dir))
            server = VllmServer(
                model_arguments(args.model, side_dir),
                side_dir,
                mooncake_config=master.write_client_config(args.segment_gib << 30),
                junctions=junctions,
                env={"VLLM_LOG_STATS_INTERVAL": str(_LOG_SECONDS)},
            )
            stack.enter_context(server)
            probe = ServerUnderProbe(server.base_url)
            sides[name] = Side(probe, probe.facts(), side_dir / "server.log")
        yield sides


def model_arguments(name: str, side_dir: Path) -> list[str]:
    """Return the server arguments for a model of the test bed."""
    served = ["--served-model-name", name]
    if name == gemma3_270m.NAME:
        folder = str(gemma3_270m.model_folder())
        size = ["--block-size", str(gemma3_270m.BLOCK_TOKENS)]
        return ["--model", folder, *size, "--load-format", "safetensors", *served]
    return [*GEMMA3.write(side_dir), *served]


def print_report(report: TtftReport, console: Console) -> None:
    """Print a line per length, and how to read it."""
    table = Table(title=f"Time to first token of the third sibling on: {report.model}")
    for column in (
        "shared",
        "stock\nhit",
        "junct.\nhit",
        "stock\ns",
        "junct.\ns",
        "ratio",
        "of pairs",
        "B's",
        "MiB",
    ):
        table.add_column(column, justify="right")
    for row in report.lengths:
        low, high = row.ratio_range
        table.add_row(
            str(row.prefix_tokens),
            str(row.stock_hit_tokens),
            str(row.junctions_hit_tokens),
            f"{row.stock_ttft_seconds:.3f}",
            f"{row.junctions_ttft_seconds:.3f}",
            f"{row.ratio:.1f}",
            f"{low:.1f}-{high:.1f}",
            f"{row.first_sibling_ratio:.2f}",
            "?" if row.loaded_bytes is None else f"{row.loaded_bytes / 2**20:.1f}",
        )
    console.print(table)
    console.print(
        f"Medians over {report.siblings - 1} siblings a side, sent to both servers in "
        "turn, local cache reset before each; ratio is stock's time by junctions', of "
        "pairs its least and greatest. B is the sibling that finds the junction: it "
        "pays the full prefill on both sides, so its ratio shows what noise does. MiB "
        "are loaded per hit. Store and server share this machine's memory: over a "
        "network, loading costs more."
    )


def draw(report: TtftReport, path: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    times, ratios = figure.subplots(1, 2)
    lengths = [row.prefix_tokens for row in report.lengths]
    for name, colour, marker, line in (
        ("stock", "#d55e00", "s", "--"),
        ("junctions", "#0072b2", "o", "-"),
    ):
        seconds = [getattr(row, f"{name}_ttft_seconds") for row in report.lengths]
        times.plot(lengths, seconds, color=colour, marker=marker, ls=line, label=name)
    times.set(title="Time to first token, third sibling on", ylabel="s")
    times.legend()
    values = [row.ratio for row in report.lengths]
    ratios.plot(lengths, values, color="#0072b2", marker="o")
    ratios.fill_between(
        lengths,
        [row.ratio_range[0] for row in report.lengths],
        [row.ratio_range[1] for row in report.lengths],
        color="#0072b2",
        alpha=0.15,
        label="least to greatest",
    )
    for row in report.lengths:
        ratios.annotate(
            f"{row.ratio:.1f}x",
            (row.prefix_tokens, row.ratio),
            xytext=(-6, 6),
            textcoords="offset points",
            ha="right",
        )
    ratios.axhline(1, color="#7f7f7f", linewidth=1)
    ratios.set(title="Stock's time by junctions'", ylabel="ratio")
    ratios.legend(loc="upper left")
    for axes in (times, ratios):
        axes.set(xlabel="shared prefix, tokens", xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report.model}, vLLM {report.vllm_version}, {report.machine}")
    figure.savefig(path, dpi=120)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stock-url")
    parser.add_argument("--junctions-url")
    parser.add_argument(
        "--model",
        default=GEMMA3.name,
        choices=(GEMMA3.name, gemma3_270m.NAME),
        help="what the own servers serve",
    )
    parser.add_argument("--lengths", type=positive, nargs="+", default=_LENGTHS)
    parser.add_argument(
        "--siblings",
        type=positive,
        default=4,
        help="B finds the junction, every further one is measured",
    )
    parser.add_argument(
        "--tail-tokens", type=positive, help="default: two scheduler blocks and a bit"
    )
    parser.add_argument(
        "--block-tokens",
        type=positive,
        help="tokens per scheduler block, where the server does not tell it right",
    )
    parser.add_argument("--segment-gib", type=positive, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS / "ttft.json")
    args = parser.parse_args(argv)
    if bool(args.stock_url) != bool(args.junctions_url):
        parser.error("--stock-url and --junctions-url go together")
    if args.siblings < _FIRST_TO_HIT:
        parser.error("--siblings has to be 2 or more: the first one never hits")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, exit_on_signal)
    work_dir = Path(tempfile.mkdtemp(prefix="junctions-ttft-"))
    keep_logs = False
    try:
        with running_sides(args, work_dir) as sides:
            report = run(args, sides)
        picture = args.json.with_suffix(".png")
        draw(report, picture)
        print_report(report, console := Console())
        console.print(f"Written to {args.json} and {picture}")
        return 0
    except (ProcessFailed, ProbeError, httpx.HTTPError) as error:
        keep_logs = not args.stock_url
        print(f"ttft: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ttft: interrupted", file=sys.stderr)
        return 130
    finally:
        if keep_logs:
            print(f"ttft: logs are in {work_dir}", file=sys.stderr)
        else:
            shutil.rmtree(work_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Many documents, few questions: what does the first sibling of a document hit?

Each document is asked two questions, the second after the next document's first. So
each prefix has one sibling, and it is the first: the one that finds a junction and pays
for it. Four arms get the same requests, one after the other in turn, each with a server
and a store of its own, and the local prefix cache is reset before each request:

- stock: ``"junctions": false``
- junctions
- predicted: junctions with ``"junctions_predict": 1``
- declared: junctions, and the first question says where its document ends

    python -m benchmarks.many_documents    (make bench-documents)
"""

import argparse
import contextlib
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.command_line import exit_on_signal, positive
from benchmarks.junction_probe import (
    ProbeError,
    ServerFacts,
    ServerUnderProbe,
)
from testbed.models import GEMMA3
from testbed.processes import ProcessFailed
from testbed.server import VllmServer, serving
from testbed.store import MooncakeMaster

SCHEMA_VERSION = 1
RESULTS = Path(__file__).parent / "results"
ARMS: dict[str, dict[str, Any]] = {
    "stock": {"junctions": False},
    "junctions": {},
    "predicted": {"junctions_predict": 1},
    "declared": {},
}
_COLOURS = {
    "stock": "#c0392b",
    "junctions": "#1e8449",
    "predicted": "#2471a3",
    "declared": "#7d3c98",
}
_DOCUMENT_TOKENS = (4000, 8000)
_QUESTION_TOKENS = (100, 400)
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 100, 999
_STORE_BYTES = "vllm:mooncake_store_operation_bytes_total"


class Request(msgspec.Struct, frozen=True):
    """A question about a document; ``number`` is 0 for the first, 1 for the second."""

    document: int
    number: int
    document_tokens: int
    prompt: list[int]


class Sample(msgspec.Struct, frozen=True):
    """What became of a request at one arm."""

    arm: str
    document: int
    number: int
    document_tokens: int
    prompt_tokens: int
    hit_tokens: int
    ttft_seconds: float


class ArmResult(msgspec.Struct, frozen=True):
    """An arm's figures over all second questions.

    Attributes:
        hit_tokens: That second questions loaded from the store, in all.
        hit_share: The same by the tokens of their documents.
        num_hits: Second questions that hit anything.
        ttft_seconds: Median time to the first token.
        speedup: Median of stock's time by this arm's, pair by pair: above 1 it is
            faster.
        put_bytes: Put into the store by all requests, in all.
    """

    hit_tokens: int
    hit_share: float
    num_hits: int
    ttft_seconds: float
    speedup: float
    put_bytes: int


class DocumentsReport(msgspec.Struct, frozen=True):
    """What ``results/documents.json`` holds."""

    schema_version: int
    date: str
    machine: str
    model: str
    vllm_version: str
    scheduler_block_tokens: int
    documents: int
    arms: dict[str, ArmResult]
    samples: list[Sample]


@dataclass(frozen=True)
class Arm:
    """A server and what a first question tells it."""

    probe: ServerUnderProbe
    base_url: str
    declares: bool

    def ask(self, model: str, request: Request) -> tuple[int, float]:
        """Send a request; return its store hit and the time to its first token."""
        declared = [request.document_tokens] if self.declares else None
        _, store, seconds = self.probe.measured(model, request.prompt, declared)
        return store, seconds

    def put_bytes(self) -> int:
        """Return the bytes put into the store so far."""
        return put_bytes(httpx.get(f"{self.base_url}/metrics", timeout=30).text)


def put_bytes(metrics: str) -> int:
    """Return what ``/metrics`` says of the bytes put into the store."""
    return int(
        sum(
            sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if sample.name == _STORE_BYTES
            and sample.labels.get("operation") == "save_put"
        )
    )


def traffic(seed: int, documents: int) -> list[Request]:
    """Return the requests in order: 0a 1a 0b 2a 1b 3a 2b ...

    Documents and questions have made-up lengths, evenly spread; all tokens are random,
    so prompts share their document and nothing else.
    """
    rng = random.Random(seed)

    def ids(bounds: tuple[int, int]) -> list[int]:
        count = rng.randint(*bounds)
        return [rng.randint(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(count)]

    firsts, seconds = [], []
    for document in range(documents):
        shared = ids(_DOCUMENT_TOKENS)
        starts = rng.sample(range(_FIRST_TOKEN_ID, _LAST_TOKEN_ID + 1), 2)
        for number, (start, into) in enumerate(
            zip(starts, (firsts, seconds), strict=True)
        ):
            prompt = [*shared, start, *ids(_QUESTION_TOKENS)]
            into.append(Request(document, number, len(shared), prompt))
    ordered = [firsts[0]]
    for first, second in zip(firsts[1:], seconds, strict=False):
        ordered += [first, second]
    return [*ordered, seconds[-1]]


def measure(arms: dict[str, Arm], requests: list[Request], model: str) -> list[Sample]:
    """Send all requests to all arms in turn.

    Raises:
        ProbeError: A server cannot go on.
    """
    samples = []
    for position, request in enumerate(tqdm(requests, desc="requests", unit="request")):
        # Each arm comes first as often as any other.
        names = list(arms)
        turn = position % len(names)
        for name in (*names[turn:], *names[:turn]):
            arms[name].probe.reset_local_cache()
            hit, seconds = arms[name].ask(model, request)
            samples.append(
                Sample(
                    name,
                    request.document,
                    request.number,
                    request.document_tokens,
                    len(request.prompt),
                    hit,
                    seconds,
                )
            )
    for arm in arms.values():
        arm.probe.reset_local_cache()
    return samples


def summarise(
    samples: list[Sample], bytes_by_arm: dict[str, int]
) -> dict[str, ArmResult]:
    """Return each arm's figures."""
    seconds = {
        name: sorted(
            (s for s in samples if s.arm == name and s.number == 1),
            key=lambda sample: sample.document,
        )
        for name in bytes_by_arm
    }
    results = {}
    for name, rows in seconds.items():
        pairs = zip(seconds["stock"], rows, strict=True)
        hit_tokens = sum(row.hit_tokens for row in rows)
        results[name] = ArmResult(
            hit_tokens=hit_tokens,
            hit_share=hit_tokens / sum(row.document_tokens for row in rows),
            num_hits=sum(bool(row.hit_tokens) for row in rows),
            ttft_seconds=statistics.median(row.ttft_seconds for row in rows),
            speedup=statistics.median(
                stock.ttft_seconds / row.ttft_seconds for stock, row in pairs
            ),
            put_bytes=bytes_by_arm[name],
        )
    return results


def run(args: argparse.Namespace, arms: dict[str, Arm]) -> DocumentsReport:
    """Measure all arms.

    Raises:
        ProbeError: A server cannot be measured.
    """
    facts: ServerFacts = arms["stock"].probe.facts()
    requests = traffic(args.seed, args.documents)
    # The first request of a server pays for what is set up lazily.
    warm_up = traffic(args.seed + 1, 1)[0].prompt
    for arm in arms.values():
        arm.probe.first_token_seconds(facts.model, warm_up)
        arm.probe.reset_local_cache()
    before = {name: arm.put_bytes() for name, arm in arms.items()}
    samples = measure(arms, requests, facts.model)
    put = {name: arm.put_bytes() - before[name] for name, arm in arms.items()}
    return DocumentsReport(
        schema_version=SCHEMA_VERSION,
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        model=facts.model,
        vllm_version=facts.vllm_version,
        scheduler_block_tokens=facts.block_tokens,
        documents=args.documents,
        arms=summarise(samples, put),
        samples=samples,
    )


@contextlib.contextmanager
def running_arms(args: argparse.Namespace, work_dir: Path) -> Iterator[dict[str, Arm]]:
    """Start a store and a server an arm, all side by side.

    Raises:
        ProbeError, ProcessFailed: One does not run.
    """
    servers = {}
    with contextlib.ExitStack() as stack:
        for name, settings in ARMS.items():
            arm_dir = work_dir / name
            master = stack.enter_context(MooncakeMaster(arm_dir))
            servers[name] = VllmServer(
                [*GEMMA3.write(arm_dir), "--served-model-name", GEMMA3.name],
                arm_dir,
                mooncake_config=master.write_client_config(args.segment_mib << 20),
                kv_transfer_config={"kv_connector_extra_config": settings},
            )
        stack.enter_context(serving(*servers.values()))
        yield {
            name: Arm(
                ServerUnderProbe(server.base_url),
                server.base_url,
                declares=name == "declared",
            )
            for name, server in servers.items()
        }


def print_report(report: DocumentsReport, console: Console) -> None:
    """Print a line per arm, and how to read it."""
    table = Table(title=f"Second question of {report.documents} documents")
    columns = ("", "hits", "hit tokens", "of documents", "TTFT s", "speedup", "MiB put")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for name, row in report.arms.items():
        table.add_row(
            name,
            f"{row.num_hits}/{report.documents}",
            str(row.hit_tokens),
            f"{row.hit_share:.1%}",
            f"{row.ttft_seconds:.3f}",
            f"{row.speedup:.2f}",
            f"{row.put_bytes / 2**20:.1f}",
        )
    console.print(table)
    console.print(
        "Documents have 4,000 to 8,000 tokens and two questions each; the second is "
        "the document's first sibling. Local cache reset before each request; speedup "
        "is the median of stock's time by the arm's, pair by pair; MiB are put by "
        "first and second questions together. Predicted tails begin once siblings "
        "have missed, so with few documents much of a run is learning."
    )


def draw(report: DocumentsReport, path: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    hits, times, sizes = figure.subplots(1, 3)
    names = list(report.arms)
    rows = list(report.arms.values())
    stock_bytes = report.arms["stock"].put_bytes
    for axes, title, values, form in (
        (hits, "Hit by the second question,\nshare of documents", _shares(rows), ".0%"),
        (times, "Stock's time to first token\nby this arm's", _speedups(rows), ".1f"),
        (
            sizes,
            "Bytes put,\nby stock's",
            [row.put_bytes / max(stock_bytes, 1) for row in rows],
            ".2f",
        ),
    ):
        bars = axes.bar(names, values, color=[_COLOURS[name] for name in names])
        axes.bar_label(bars, [format(value, form) for value in values], padding=2)
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.15)
        axes.tick_params(axis="x", labelsize=9)
    hits.set_ylim(0, 1.15)
    for axes in (times, sizes):
        axes.axhline(1, color="#7f7f7f", linewidth=1, linestyle="--")
    figure.suptitle(
        f"{report.documents} documents, two questions each: {report.model}, "
        f"vLLM {report.vllm_version}, {report.machine}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _shares(rows: list[ArmResult]) -> list[float]:
    return [row.hit_share for row in rows]


def _speedups(rows: list[ArmResult]) -> list[float]:
    return [row.speedup for row in rows]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=positive, default=8)
    parser.add_argument("--segment-mib", type=positive, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS / "documents.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, exit_on_signal)
    work_dir = Path(tempfile.mkdtemp(prefix="junctions-documents-"))
    keep_logs = False
    try:
        with running_arms(args, work_dir) as arms:
            report = run(args, arms)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        picture = args.json.with_suffix(".png")
        draw(report, picture)
        print_report(report, console := Console())
        console.print(f"Written to {args.json} and {picture}")
        return 0
    except (ProcessFailed, ProbeError, httpx.HTTPError) as error:
        keep_logs = True
        print(f"documents: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("documents: interrupted", file=sys.stderr)
        return 130
    finally:
        if keep_logs:
            print(f"documents: logs are in {work_dir}", file=sys.stderr)
        else:
            shutil.rmtree(work_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

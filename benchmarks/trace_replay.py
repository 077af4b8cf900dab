# SPDX-License-Identifier: Apache-2.0
"""What retention policies are worth on a trace of real prompts, without a model.

Replays a trace in Mooncake's format (``timestamp``, ``input_length``,
``output_length``, ``hash_ids``) through vLLM's store coordinator and this package's:
who would hit what, and what the store would have to hold. ``make bench-trace
TRACE=path`` runs it, and ``make bench-placement`` on made-up traffic of several kinds.
"""

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.replay.layouts import DEFAULT_LAYOUT, LAYOUTS, ModelLayout
from benchmarks.replay.picture import write_picture
from benchmarks.replay.policies import Policy, policies
from benchmarks.replay.replay import Cluster, Replay
from benchmarks.replay.report import (
    Replayed,
    SetupFigures,
    TraceFigures,
    TraceReport,
    policy_figures,
    print_predictions,
    print_report,
    write_json,
)
from benchmarks.replay.trace import Prompts, TraceError, number_prompts, read_trace
from benchmarks.replay.traffic import TRAFFIC, make_traffic
from vllm.junctions.seams.compat import vllm_version

RESULTS = Path(__file__).parent / "results"
_GIB = 2**30


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="trace_replay", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "trace", type=Path, nargs="?", help="a JSONL file, one request a line"
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=DEFAULT_LAYOUT,
        help="; ".join(
            f"{layout.name}: {layout.summary}" for layout in LAYOUTS.values()
        ),
    )
    parser.add_argument(
        "--instances", type=_positive, default=1, help="vLLM instances on the store"
    )
    parser.add_argument(
        "--router",
        choices=("round-robin", "sticky"),
        default="round-robin",
        help="sticky: prompts that begin with the same 512 tokens stay together",
    )
    parser.add_argument(
        "--local-blocks",
        type=_count,
        default=0,
        help="blocks of each instance's own prefix cache; 0: none, the store alone",
    )
    parser.add_argument(
        "--store-gib", type=_positive, help="what the store holds; default: no bound"
    )
    parser.add_argument(
        "--intervals",
        type=_positive,
        nargs="*",
        default=[1024, 4096, 16384],
        help="fixed retention intervals to compare with, in tokens",
    )
    parser.add_argument(
        "--predict",
        type=_positive,
        nargs="*",
        default=[1, 2],
        help="most predicted tails of a prompt, beside junctions",
    )
    parser.add_argument(
        "--traffic",
        choices=TRAFFIC,
        help="make traffic of this kind up instead of reading a trace",
    )
    parser.add_argument(
        "--requests", type=_positive, help="replay only the first ones; default: all"
    )
    parser.add_argument(
        "--assume-continued",
        action="store_true",
        help="take a prompt that goes on where an earlier one's last whole block ends "
        "to share that one's last block too",
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "trace.json")
    parser.add_argument("--picture", type=Path, default=RESULTS / "trace.png")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def replay_all(
    todo: list[Policy], layout: ModelLayout, prompts: Prompts, cluster: Cluster
) -> Iterator[Replayed]:
    """Replay one policy after the other, with a progress bar on stderr."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for policy in todo:
            task = progress.add_task(policy.name, total=len(prompts.prompts))
            start = time.perf_counter()
            outcome = Replay(policy, layout, prompts, cluster).run(
                lambda task=task: progress.advance(task)
            )
            yield Replayed(policy, outcome, time.perf_counter() - start)


def make_report(
    args: argparse.Namespace,
    cluster: Cluster,
    prompts: Prompts,
    replayed: list[Replayed],
) -> TraceReport:
    layout = LAYOUTS[args.layout]
    ceiling = replayed[0].outcome
    return TraceReport(
        trace=TraceFigures(
            name=args.traffic or args.trace.name,
            requests=len(prompts.prompts),
            first_requests_only=args.requests,
            prompt_tokens=prompts.num_tokens,
            matched_requests=sum(hit > 0 for hit in ceiling.hit_tokens),
            assume_continued=args.assume_continued,
        ),
        setup=SetupFigures(
            vllm_version=vllm_version(),
            layout=layout.name,
            layout_summary=layout.summary,
            scheduler_block_tokens=layout.scheduler_block_tokens,
            block_bytes=layout.block_bytes,
            instances=cluster.num_instances,
            router=cluster.router,
            local_blocks=cluster.local_blocks,
            store_blocks=cluster.store_blocks,
        ),
        policies=policy_figures(replayed, prompts.num_tokens, layout.block_bytes),
    )


def _prompts(args: argparse.Namespace, hash_tokens: int) -> Prompts:
    if args.traffic:
        return make_traffic(args.traffic, hash_tokens, args.requests or 3000)
    if args.trace is None:
        raise TraceError("Name a trace: make bench-trace TRACE=path.")
    requests = read_trace(args.trace, args.requests)
    return number_prompts(requests, hash_tokens, args.assume_continued)


def run(args: argparse.Namespace, console: Console) -> None:
    """Replay all policies; write what there is after each, print it at the end.

    Raises:
        TraceError: There is no trace, or none that can be replayed.
        ValueError: An interval does not fit the layout.
    """
    layout = LAYOUTS[args.layout]
    todo = policies(args.intervals, layout.scheduler_block_tokens, args.predict)
    prompts = _prompts(args, layout.hash_tokens)
    cluster = Cluster(
        args.instances,
        args.router,
        args.local_blocks,
        args.store_gib and args.store_gib * _GIB // layout.block_bytes,
    )
    replayed: list[Replayed] = []
    for done in replay_all(todo, layout, prompts, cluster):
        replayed.append(done)
        report = make_report(args, cluster, prompts, replayed)
        write_json(report, args.json)
    print_report(report, console)
    print_predictions(report, console)
    console.print(f"Written to {args.json}", soft_wrap=True)
    if write_picture(report, args.picture):
        console.print(f"Drawn in {args.picture}", soft_wrap=True)
    else:
        console.print("No picture: no two prompts of this trace share a prefix.")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        run(args, Console())
    except (TraceError, ValueError) as error:
        print(f"trace_replay: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"trace_replay: interrupted; what was finished is in {args.json}.",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

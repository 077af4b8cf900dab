# SPDX-License-Identifier: Apache-2.0
"""Would it help me? Replay a recording, or a trace, and say which settings to use.

``python -m vllm.junctions.plan TRACE [TRACE ...]``: recordings made with the setting
``junctions_record``, or traces in Mooncake's format. Several are of instances that ran
side by side on one store.
"""

import argparse
import logging
import math
import sys
from pathlib import Path

from vllm.junctions.config import MAX_PREDICTED_TAILS
from vllm.junctions.plan import text
from vllm.junctions.plan.figures import PlanReport, write_json
from vllm.junctions.plan.layouts import DEFAULT_LAYOUT, LAYOUTS
from vllm.junctions.plan.picture import NoPicture, write_picture
from vllm.junctions.plan.run import Options, make_plan
from vllm.junctions.plan.trace import TraceError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what says on what a trace is replayed, and under what."""
    names = "; ".join(f"{one.name}: {one.summary}" for one in LAYOUTS.values())
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help=f"of traces that do not say, or instead of the recorded one; default: "
        f"{DEFAULT_LAYOUT}. {names}",
    )
    parser.add_argument(
        "--block-tokens",
        type=positive,
        help="tokens per hash id, of traces that do not say; default: 512",
    )
    parser.add_argument(
        "--instances",
        type=positive,
        help="vLLM instances on the store; default: one a file",
    )
    parser.add_argument(
        "--router",
        choices=("round-robin", "sticky"),
        default="round-robin",
        help="who gets a prompt, where files do not say; sticky: prompts that begin "
        "with the same block stay together",
    )
    parser.add_argument(
        "--local-blocks",
        type=count,
        help="blocks of each instance's own cache; 0: none; default: as recorded",
    )
    _add_policies(parser)


def _add_policies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store-gib", type=above_zero, help="what the store holds; default: no bound"
    )
    parser.add_argument(
        "--intervals",
        type=positive,
        nargs="*",
        help="retention intervals to compare with, in tokens; default: 1024 4096 16384",
    )
    parser.add_argument(
        "--predict",
        type=num_tails,
        nargs="*",
        default=[1, 2],
        help="most predicted tails of a prompt, beside junctions: 0 to "
        f"{MAX_PREDICTED_TAILS}; default: 1 2",
    )
    parser.add_argument(
        "--requests", type=positive, help="replay only the first ones; default: all"
    )
    parser.add_argument(
        "--assume-continued",
        action="store_true",
        help="take a prompt that goes on where an earlier one's last whole block ends "
        "to share that one's last block too",
    )


def count(value: str) -> int:
    """Return a number of at least 0."""
    number = int(value)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return number


def positive(value: str) -> int:
    """Return a number of at least 1."""
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return number


def above_zero(value: str) -> float:
    """Return a number above 0, whole or not."""
    number = float(value)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is no size above 0")
    return number


def num_tails(value: str) -> int:
    """Return what ``junctions_predict`` takes."""
    number = int(value)
    if not 0 <= number <= MAX_PREDICTED_TAILS:
        raise argparse.ArgumentTypeError(
            f"{value} is not one of 0 to {MAX_PREDICTED_TAILS}, as junctions_predict is"
        )
    return number


def options_of(args: argparse.Namespace) -> Options:
    """Return what :func:`add_options` read."""
    return Options(
        layout=args.layout and LAYOUTS[args.layout],
        block_tokens=args.block_tokens,
        instances=args.instances,
        router=args.router,
        local_blocks=args.local_blocks,
        store_gib=args.store_gib,
        intervals=args.intervals,
        predict=args.predict,
        requests=args.requests,
        assume_continued=args.assume_continued,
    )


def show(report: PlanReport) -> None:
    """Print a plan."""
    print(f"{text.describe(report)}\n\n{text.table(report)}\n")
    print(text.how_to_read(report))
    for line in text.predictions(report):
        print(line)
    if comparison := text.recorded(report):
        print(comparison)
    if report.trace.id_spaces > 1:
        print(
            "These recordings were made with different secrets (or PYTHONHASHSEED): "
            "what their instances share with one another is not seen, and the advice "
            "is for instances that share nothing. Record again with the same "
            "junctions_record_secret on all of them."
        )
    if report.trace.forgotten_tokens:
        print(
            f"{report.trace.forgotten_tokens:,} tokens that nobody came back to for "
            "longest were forgotten, to stay in memory."
        )
    if report.advice is not None:
        print("\n" + "\n".join(report.advice.sentences))


def draw(report: PlanReport, path: Path) -> None:
    """Draw a plan, or say why not."""
    try:
        write_picture(report, path)
    except NoPicture as reason:
        print(f"No picture: {reason}")
    else:
        print(f"Drawn in {path}")


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm.junctions.plan", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    add_options(parser)
    parser.add_argument("--json", type=Path, help="a file to write all figures to")
    parser.add_argument("--picture", type=Path, help="a file to draw a picture in")
    args = parser.parse_args(argv)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        report = make_plan(args.traces, options_of(args))
    except (TraceError, ValueError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plan: interrupted", file=sys.stderr)
        return 130
    show(report)
    if args.json is not None:
        write_json(report, args.json)
        print(f"Written to {args.json}")
    if args.picture is not None:
        draw(report, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What retention policies are worth on a trace of real prompts, without a model.

``python -m vllm.junctions.plan`` with a table and a picture in any case, and with
made-up traffic of several kinds. ``make bench-trace TRACE=path`` runs it, and ``make
bench-placement`` on each kind of traffic.
"""

import argparse
import logging
import sys
from pathlib import Path

from benchmarks.replay.traffic import TRAFFIC, make_traffic
from vllm.junctions.plan.__main__ import add_options, draw, options_of, show
from vllm.junctions.plan.figures import PlanReport, TraceFigures, write_json
from vllm.junctions.plan.layouts import DEFAULT_LAYOUT, LAYOUTS
from vllm.junctions.plan.replay import Replay
from vllm.junctions.plan.run import Options, cluster_of, make_plan, replay_all
from vllm.junctions.plan.trace import TraceError

RESULTS = Path(__file__).parent / "results"
_NUM_MADE_UP = 3000


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="trace_replay", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "trace", type=Path, nargs="?", help="a JSONL file, one request a line"
    )
    add_options(parser)
    parser.add_argument(
        "--traffic",
        choices=TRAFFIC,
        help="make traffic of this kind up instead of reading a trace",
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "trace.json")
    parser.add_argument("--picture", type=Path, default=RESULTS / "trace.png")
    return parser.parse_args(argv)


def replay_traffic(kind: str, options: Options) -> PlanReport:
    layout = options.layout or LAYOUTS[DEFAULT_LAYOUT]
    prompts = make_traffic(kind, layout.grain_tokens, options.requests or _NUM_MADE_UP)

    def describe(replay: Replay) -> TraceFigures:
        return TraceFigures(
            name=kind,
            requests=replay.num_requests,
            prompt_tokens=replay.prompt_tokens,
            matched_requests=replay.outcomes[0].num_hits,
            lookup_keys=replay.num_lookup_keys,
        )

    cluster = cluster_of(layout, options, None)
    return replay_all(prompts, layout, cluster, options, describe)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    options = options_of(args)
    try:
        if args.traffic:
            report = replay_traffic(args.traffic, options)
        elif args.trace is None:
            raise TraceError("Name a trace: make bench-trace TRACE=path.")
        else:
            report = make_plan([args.trace], options)
    except (TraceError, ValueError) as error:
        print(f"trace_replay: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trace_replay: interrupted", file=sys.stderr)
        return 130
    show(report)
    write_json(report, args.json)
    print(f"Written to {args.json}")
    draw(report, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

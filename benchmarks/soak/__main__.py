# SPDX-License-Identifier: Apache-2.0
"""Soak two instances on one store, and say what went wrong.

    python -m benchmarks.soak --minutes 30

Starts a ``mooncake_master``, two vLLM servers that share it and one without a
store, all on this machine, and ends them whatever happens. Exit status 0: nothing
went wrong; 1: something did; 130: interrupted.
"""

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

import vllm
from benchmarks.command_line import exit_on_signal
from benchmarks.soak.fleet import Fleet
from benchmarks.soak.report import SoakReport
from benchmarks.soak.run import Soak
from testbed.models import DEFAULT_MODEL, MODELS
from testbed.processes import ProcessFailed

RESULTS = Path(__file__).parents[1] / "results"


def soak(args: argparse.Namespace, work_dir: Path, console: Console) -> SoakReport:
    """Run; return the report with its problems."""
    report = SoakReport(
        seed=args.seed,
        minutes=args.minutes,
        junctions=args.junctions == "on",
        model=args.model,
        vllm_version=vllm.__version__,
    )
    with Fleet(MODELS[args.model], work_dir, report.junctions) as fleet:
        asyncio.run(Soak(fleet, report, args.clients, work_dir, console).run())
    report.conclude()
    return report


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(1 << 32),
        help="of all traffic, resets and faults; default: a new one, reported",
    )
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--model", choices=sorted(MODELS), default=DEFAULT_MODEL)
    parser.add_argument(
        "--junctions",
        choices=("on", "off"),
        default="on",
        help="off: stock instances, to tell whose fault a finding is",
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "soak.json")
    parser.add_argument("--keep-logs", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, exit_on_signal)
    console = Console(soft_wrap=True)
    work_dir = Path(tempfile.mkdtemp(prefix="junctions-soak-"))
    console.print(f"soak: seed {args.seed}, logs in {work_dir}")
    keep = True
    try:
        report = soak(args, work_dir, console)
        keep = bool(report.problems) or args.keep_logs
    except ProcessFailed as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        keep = args.keep_logs
        print("soak: interrupted", file=sys.stderr)
        return 130
    finally:
        if not keep:
            shutil.rmtree(work_dir, ignore_errors=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    console.print(msgspec.json.format(msgspec.json.encode(report)).decode())
    for problem in report.problems:
        console.print(f"[bold red]WRONG:[/] {problem}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())

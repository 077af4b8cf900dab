# SPDX-License-Identifier: Apache-2.0
"""The junction probe twice on this machine: stock, then with junctions.

Starts a real ``mooncake_master`` and a real vLLM server (tiny model, random
weights) for each side, prints both in one table and checks it. ``make demo`` runs
it; ``MODEL=`` selects another model.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import junction_probe
from benchmarks.command_line import exit_on_signal
from benchmarks.demo_result import RESULTS, DemoResult, DemoRow
from benchmarks.junction_probe import ProbeReport, ProbeRow
from testbed.models import DEFAULT_MODEL, MODELS, TinyModel
from testbed.processes import ProcessFailed
from testbed.server import VllmServer
from testbed.store import MooncakeMaster

SEED_TABLE = "seed-table"
# The ``junctions`` setting of each side.
_SIDES = {"stock": False, "junctions": True}


def _server_settings(side: str, patched: Path | None) -> dict[str, Any]:
    """Return what makes a server one of ``side``.

    With ``patched``, a folder that brings a vLLM with the in-tree series, this package
    is loaded on neither side.
    """
    if patched is None:
        return {"junctions": _SIDES[side]}
    python_path = {"PYTHONPATH": str(patched)} if side == "junctions" else {}
    return {"env": {"VLLM_PLUGINS": "", **python_path}}


def run_side(
    model: TinyModel,
    side: str,
    work_dir: Path,
    patched: Path | None = None,
    declared: bool = False,
) -> ProbeReport:
    """Probe one side on a store and a server of its own."""
    side_dir = work_dir / side
    settings = _server_settings(side, patched)
    with MooncakeMaster(side_dir) as master:
        server = VllmServer(
            model.write(side_dir),
            side_dir,
            mooncake_config=master.write_client_config(),
            **{**settings, "env": {**model.env(side_dir), **settings.get("env", {})}},
        )
        with server:
            if patched is not None and "vllm-junctions" in server.log():
                raise junction_probe.ProbeError("the overlay is loaded as well")
            args = junction_probe.parse_args(["--base-url", server.base_url])
            args.block_tokens = model.block_tokens
            args.declare = declared
            return junction_probe.probe(args)


def failures(
    model: TinyModel, reports: dict[str, ProbeReport], declared: bool = False
) -> list[str]:
    """Say in words what does not hold; empty when the demo shows what it should."""
    found = []
    expected_to_hit = "BCD" if declared else "CD"
    stock, ours = reports["stock"].rows, reports["junctions"].rows
    for row in stock:
        if row.name in "BCD" and row.store_hit_tokens:
            found.append(f"stock sibling {_label(row)} hit {row.store_hit_tokens}")
    for row in ours:
        expected = model.expected_hit_tokens(row.shared_tokens)
        if row.name in expected_to_hit and row.store_hit_tokens != expected:
            found.append(
                f"sibling {_label(row)} hit {row.store_hit_tokens}, not {expected}"
            )
    for before, after in zip(stock, ours, strict=True):
        if before.name == "A again" and (
            after.store_hit_tokens < before.store_hit_tokens
        ):
            found.append(
                f"the replay of A ({_label(after)}) hit {after.store_hit_tokens}, "
                f"stock {before.store_hit_tokens}"
            )
    found += [
        f"{_label(row)} hit {row.local_hit_tokens} locally in spite of the reset"
        for row in (*stock, *ours)
        if row.local_hit_tokens
    ]
    return found


def _label(row: ProbeRow) -> str:
    return f"{row.name} (d={row.diverge_tokens})"


# Why siblings hit with junctions: found by a lookup, or declared.
_WHY = {
    False: "With junctions, B's lookup reports where A and B part, B keeps the tails "
    "there, and every later sibling hits",
    True: "A declares where its siblings part, keeps the tails there, and its first "
    "sibling hits",
}


def print_comparison(
    model: TinyModel,
    reports: dict[str, ProbeReport],
    console: Console,
    ours_name: str = "junctions",
    declared: bool = False,
) -> None:
    """Print both sides in one table, and what they mean."""
    table = Table(title=f"Tokens loaded from the Mooncake store: {model.summary}")
    for column in (
        "d",
        "request",
        "prompt tokens",
        "stock hit",
        f"{ours_name} hit",
        "stock TTFT s",
        f"{ours_name} TTFT s",
    ):
        table.add_column(column, justify="right")
    pairs = zip(reports["stock"].rows, reports["junctions"].rows, strict=True)
    for stock, ours in pairs:
        table.add_row(
            str(stock.diverge_tokens),
            stock.name,
            str(stock.prompt_tokens),
            str(stock.store_hit_tokens),
            str(ours.store_hit_tokens),
            f"{stock.ttft_seconds:.3f}",
            f"{ours.ttft_seconds:.3f}",
        )
    console.print(table)
    report = reports["junctions"]
    first = next(row for row in report.rows if row.name == ("B" if declared else "C"))
    console.print(
        f"A, B, C and D share a prefix of {report.prefix_tokens} tokens and d tokens "
        "more; the local cache is reset before each request, as on a fresh instance. "
        "Stock vLLM stores sliding-window tails only where a replay of the same "
        f"prompt could resume, so a sibling hits nothing. {_WHY[declared]}: "
        f"{first.name} loads {first.store_hit_tokens} of {first.prompt_tokens} "
        f"tokens (d={first.diverge_tokens}). A's own replay is as before. Siblings "
        f"reach at least {report.tail_tokens} tokens past the point where they part "
        f"({report.scheduler_block_tokens} tokens per scheduler block): shorter ones "
        "can let stock hit by luck.",
        soft_wrap=False,
    )


def _demo_rows(report: ProbeReport) -> list[DemoRow]:
    return [
        DemoRow(**{name: getattr(row, name) for name in DemoRow.__struct_fields__})
        for row in report.rows
    ]


def run(
    model: TinyModel,
    json_path: Path,
    work_dir: Path,
    patched: Path | None = None,
    declared: bool = False,
) -> int:
    """Run both sides, print, check and write the result; return an exit status."""
    console = Console()
    reports = {}
    for side in _SIDES:
        console.print(f"{side}: starting mooncake_master and a vLLM server ...")
        reports[side] = run_side(model, side, work_dir, patched, declared)
    result = DemoResult(**{side: _demo_rows(reports[side]) for side in _SIDES})
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    ours_name = "junctions" if patched is None else "patched"
    print_comparison(model, reports, console, ours_name, declared)
    console.print(f"Written to {json_path}")
    problems = failures(model, reports, declared)
    for problem in problems:
        console.print(f"[bold red]NOT AS EXPECTED:[/] {problem}")
    return 1 if problems else 0


def _patched_vllm() -> Path:
    from tools.series.apply import patched_tree
    from tools.series.installed import patched_installation
    from tools.upstream import installed_version

    return patched_installation(patched_tree(installed_version()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="; ".join(f"{name}: {model.summary}" for name, model in MODELS.items())
        + f"; {SEED_TABLE}: the scheduler and the connector alone, without a model",
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "demo.json")
    parser.add_argument(
        "--patched",
        action="store_true",
        help="a vLLM with the in-tree series, without this package, beside stock",
    )
    parser.add_argument(
        "--declared",
        action="store_true",
        help="A declares where its siblings part: the first one, B, hits",
    )
    parser.add_argument(
        "--keep-logs", action="store_true", help="keep the servers' logs, say where"
    )
    args = parser.parse_args(argv)
    if args.declared and (args.model == SEED_TABLE or args.patched):
        parser.error("--declared needs a model, and this package")
    if args.model == SEED_TABLE:
        # It sets up its process for an engine in a box, which servers would inherit.
        from benchmarks import seed_table

        return seed_table.run(args.json)
    if args.model not in MODELS:
        names = ", ".join((*MODELS, SEED_TABLE))
        print(f"demo: no model {args.model!r}; one of: {names}")
        return 2
    signal.signal(signal.SIGTERM, exit_on_signal)
    work_dir = Path(tempfile.mkdtemp(prefix="junctions-demo-"))
    keep = args.keep_logs
    try:
        patched = _patched_vllm() if args.patched else None
        return run(MODELS[args.model], args.json, work_dir, patched, args.declared)
    except (ProcessFailed, junction_probe.ProbeError, httpx.HTTPError) as error:
        keep = True
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    finally:
        if keep:
            print(f"demo: logs are in {work_dir}", file=sys.stderr)
        else:
            shutil.rmtree(work_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

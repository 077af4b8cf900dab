# SPDX-License-Identifier: Apache-2.0
"""GSM8K with few-shot prompts: what do questions of a shared prefix hit?

Against a running server:

    python -m benchmarks.gsm8k_shared_prefix --base-url http://127.0.0.1:8000 \\
        --dataset test.jsonl --shots-from train.jsonl --reset-local-cache --json A.json

Here, with a store and servers of its own (``make bench-gsm8k``):

    python -m benchmarks.gsm8k_shared_prefix --arms none stock junctions

Every answer is on disk before the next question is asked; the same command goes on
where an earlier one ended.
"""

import argparse
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from tqdm import tqdm

from benchmarks.command_line import exit_on_signal, positive
from benchmarks.gsm8k.arms import ARMS, serving
from benchmarks.gsm8k.asking import Asking, CompletionServer
from benchmarks.gsm8k.data import (
    INSTRUCTION,
    Example,
    fetched,
    fingerprint,
    prompt_for,
    read_examples,
    shared_prefix,
)
from benchmarks.gsm8k.journal import SCHEMA_VERSION, Journal, Settings
from benchmarks.gsm8k.plot import draw
from benchmarks.gsm8k.printing import print_report
from benchmarks.gsm8k.report import (
    ArmReport,
    Comparison,
    Report,
    compare,
    new_report,
    summarise,
)
from benchmarks.junction_probe import ProbeError, scheduler_block_tokens
from testbed.processes import ProcessFailed

RESULTS = Path(__file__).parent / "results"


def ask_server(
    args: argparse.Namespace, base_url: str, arm: str, reset_local_cache: bool
) -> Journal:
    """Ask one server all questions; return the journal that holds the answers.

    Raises:
        ProbeError: The server or the data set does not allow it.
    """
    shots, questions = load_dataset(args)
    prefix = shared_prefix(shots)
    prompts = [prompt_for(prefix, q.question, args.instruction) for q in questions]
    server = CompletionServer(base_url, args.timeout)
    model = server.select_model(args.model)
    server.counters()
    settings = settings_of(args, server, model, prefix, prompts, reset_local_cache)
    journal = Journal(journal_path(args.json, arm), settings)
    if journal.dropped_cut_line:
        tqdm.write(f"{arm}: the last line of {journal.path} was cut; asking it again")
    if journal.answers:
        tqdm.write(
            f"{arm}: goes on after {len(journal.answers)} questions in {journal.path}"
        )
    asking = Asking(
        server=server,
        model=model,
        prompts=prompts,
        examples=questions,
        max_tokens=args.max_tokens,
        concurrency=args.concurrency,
        reset_local_cache=reset_local_cache,
    )
    with tqdm(
        total=len(questions), initial=len(journal.answers), desc=arm, unit="question"
    ) as bar:
        asking.run(journal, bar.update)
    return journal


def settings_of(
    args: argparse.Namespace,
    server: CompletionServer,
    model: str,
    prefix: str,
    prompts: Sequence[str],
    reset_local_cache: bool,
) -> Settings:
    """Return what makes this run's answers comparable to another's."""
    config = server.config()
    prefix_tokens = server.count_tokens(model, prefix)
    lengths = [server.count_tokens(model, prompt) for prompt in prompts]
    return Settings(
        schema_version=SCHEMA_VERSION,
        model=model,
        dtype=str(config.get("model_config", {}).get("dtype", "")),
        vllm_version=server.version(),
        shots=args.shots,
        questions=len(prompts),
        concurrency=args.concurrency,
        reset_local_cache=reset_local_cache,
        max_tokens=args.max_tokens,
        instruction=args.instruction,
        prompts=fingerprint(*prompts),
        prefix_tokens=prefix_tokens,
        past_prefix_tokens=[length - prefix_tokens for length in lengths],
        scheduler_block_tokens=scheduler_block_tokens(config.get("cache_config", {})),
    )


def journal_path(json_path: Path, arm: str) -> Path:
    """Return where an arm's answers go: beside the result, one a line."""
    return json_path.with_name(f"{json_path.stem}.{arm}.jsonl")


def kept_journals(json_path: Path) -> dict[str, Journal]:
    """Return the journals beside a result, by arm.

    Raises:
        ProbeError: There is none, or one is damaged.
    """
    found = {arm: journal_path(json_path, arm) for arm in (*ARMS, "server")}
    journals = {arm: Journal(path) for arm, path in found.items() if path.exists()}
    if not journals:
        raise ProbeError(f"There are no answers beside {json_path}")
    return journals


def load_dataset(args: argparse.Namespace) -> tuple[list[Example], list[Example]]:
    """Return the few-shot examples and the questions.

    Raises:
        ProbeError: A file cannot be used, or is too short.
    """
    shots_path = args.shots_from or fetched("train")
    questions_path = args.dataset or fetched("test")
    shots, questions = read_examples(shots_path), read_examples(questions_path)
    for wanted, examples, path in (
        (args.shots, shots, shots_path),
        (args.questions, questions, questions_path),
    ):
        if wanted > len(examples):
            raise ProbeError(f"{path} has {len(examples)} examples, not {wanted}")
    return shots[: args.shots], questions[: args.questions]


def run_arms(args: argparse.Namespace, work_dir: Path) -> dict[str, Journal]:
    """Ask a store and a server of its own per arm.

    Raises:
        ProbeError, ProcessFailed, httpx.HTTPError: An arm failed; the others have
            been asked to the end.
    """
    journals: dict[str, Journal] = {}
    errors: list[Exception] = []
    turns = threading.Semaphore(args.arms_at_once)

    def run(name: str) -> None:
        arm = ARMS[name]
        try:
            with turns, serving(arm, args.dtype, args.threads, work_dir) as base_url:
                journals[name] = ask_server(args, base_url, name, arm.reset_local_cache)
        except Exception as error:
            errors.append(error)

    # Daemons: an interrupted main thread leaves at once, and the servers with it.
    threads = [threading.Thread(target=run, args=[n], daemon=True) for n in args.arms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {name: journals[name] for name in args.arms}


def run(args: argparse.Namespace, work_dir: Path) -> Report:
    """Ask, and return the figures.

    Raises:
        ProbeError, ProcessFailed, httpx.HTTPError: See ``run_arms``.
    """
    if args.again:
        journals = kept_journals(args.json)
    elif args.arms:
        journals = run_arms(args, work_dir)
    else:
        journals = {
            "server": ask_server(args, args.base_url, "server", args.reset_local_cache)
        }
    return new_report(
        {name: summarise(journal) for name, journal in journals.items()},
        datetime.now(UTC).date().isoformat(),
        f"{platform.machine()}, {os.cpu_count()} cores",
    )


def read_report(path: Path) -> Report:
    """Read a result.

    Raises:
        ProbeError: It cannot be read, or is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ProbeError(f"Cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ProbeError(f"{path} is no result of this benchmark: {error}") from error


def compared_to(ours: Report, other: Report, other_name: str) -> list[Comparison]:
    """Compare each arm to the other report's arm of its name, or to its only one.

    Raises:
        ProbeError: Nothing in the two can be compared.
    """

    def counterpart(name: str) -> ArmReport | None:
        only = next(iter(other.arms.values())) if len(other.arms) == 1 else None
        return other.arms.get(name, only)

    found = [
        entry
        for name, arm in ours.arms.items()
        if (theirs := counterpart(name))
        and (entry := compare((f"{other_name}: {name}", name), theirs, arm))
    ]
    if not found:
        raise ProbeError(
            f"{other_name} cannot be compared with: it asked other prompts (questions, "
            "shots or instruction differ)"
        )
    return found


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--base-url", default="http://127.0.0.1:8000")
    where.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        metavar="ARM",
        help="start servers of Gemma 3 270M here; "
        + "; ".join(f"{arm.name}: {arm.summary}" for arm in ARMS.values()),
    )
    where.add_argument(
        "--again",
        action="store_true",
        help="ask nobody: report what the answers beside --json show so far",
    )
    data = parser.add_argument_group("what is asked")
    data.add_argument("--model", help="default: the first that the server serves")
    data.add_argument(
        "--dataset",
        type=Path,
        metavar="JSONL",
        help="the questions; default: GSM8K's test set, fetched once",
    )
    data.add_argument(
        "--shots-from",
        type=Path,
        metavar="JSONL",
        help="the few-shot examples; default: GSM8K's training set, fetched once",
    )
    data.add_argument("--shots", type=positive, default=10)
    data.add_argument("--questions", type=positive, default=200)
    data.add_argument(
        "--instruction",
        default=INSTRUCTION,
        help="put behind each question; '' leaves it out, and then stock hits by luck",
    )
    data.add_argument("--max-tokens", type=positive, default=256)
    how = parser.add_argument_group("how")
    how.add_argument("--concurrency", type=positive, default=1)
    how.add_argument(
        "--reset-local-cache",
        action="store_true",
        help="before each question, so that all hits come from the store",
    )
    how.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    how.add_argument("--json", type=Path, default=RESULTS / "gsm8k.json")
    how.add_argument("--compare", type=Path, metavar="OTHER.json")
    arms = parser.add_argument_group("with --arms")
    arms.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arms.add_argument("--threads", type=positive, default=2, help="of each server")
    arms.add_argument(
        "--arms-at-once",
        type=positive,
        default=1,
        help="arms that share the machine; their times are then of a busy one",
    )
    args = parser.parse_args(argv)
    if args.concurrency > 1 and (args.reset_local_cache or args.arms):
        parser.error("the cache is reset before each question: --concurrency 1")
    return args


def finish(args: argparse.Namespace, report: Report) -> None:
    """Write, draw and print a report.

    Raises:
        ProbeError: The report to compare with cannot be used.
    """
    console = Console()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    picture = args.json.with_suffix(".png")
    draw(report, picture)
    if args.compare:
        other = read_report(args.compare)
        extra = compared_to(report, other, args.compare.stem)
        report = msgspec.structs.replace(
            report, comparisons=[*report.comparisons, *extra]
        )
    print_report(report, console)
    console.print(f"Written to {args.json} and {picture}")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, exit_on_signal)
    work_dir = Path(tempfile.mkdtemp(prefix="junctions-gsm8k-"))
    keep_logs = False
    try:
        finish(args, run(args, work_dir))
        return 0
    except (ProcessFailed, ProbeError, httpx.HTTPError) as error:
        keep_logs = bool(args.arms)
        print(f"gsm8k: {error}", file=sys.stderr)
        _say_what_is_kept(args)
        return 1
    except KeyboardInterrupt:
        print("gsm8k: interrupted", file=sys.stderr)
        _say_what_is_kept(args)
        return 130
    finally:
        if keep_logs:
            print(f"gsm8k: logs are in {work_dir}", file=sys.stderr)
        else:
            shutil.rmtree(work_dir, ignore_errors=True)


def _say_what_is_kept(args: argparse.Namespace) -> None:
    kept = [journal_path(args.json, arm) for arm in args.arms or ["server"]]
    if not args.again and any(path.exists() for path in kept):
        print(
            f"gsm8k: what was answered is kept in {args.json.parent}; the same command "
            "goes on from there",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Do siblings of a shared prefix hit the store? Ask a running server.

For each distance ``d`` the probe sends request A (shared prefix + d tokens + its
own rest), three siblings B, C, D (the same prefix and d tokens, other rests) and A
again, and resets the server's local prefix cache before each, so that whatever
hits comes from the store. Hits are the server's own Prometheus counters.

    python benchmarks/junction_probe.py --base-url http://127.0.0.1:8000

The server needs ``VLLM_SERVER_DEV_MODE=1`` (for ``/reset_prefix_cache``) and the
``MooncakeStoreConnector``, and nobody else's traffic while the probe runs.
"""

import argparse
import random
import sys
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

SCHEMA_VERSION = 1
_SIBLINGS = ("B", "C", "D")
_LOCAL_QUERIES = "vllm:prefix_cache_queries"
_LOCAL_HITS = "vllm:prefix_cache_hits"
_STORE_HITS = "vllm:external_prefix_cache_hits"
_CONNECTOR = "MooncakeStoreConnector"


class ProbeError(RuntimeError):
    """The probe cannot go on; the message says why and what to do."""


class ProbeRow(msgspec.Struct, frozen=True):
    """One request. Lengths in tokens, times in seconds.

    ``ttft_seconds`` runs from sending the request to its first token.
    """

    name: str
    diverge_tokens: int
    prompt_tokens: int
    local_hit_tokens: int
    store_hit_tokens: int
    ttft_seconds: float
    shared_tokens: int
    own_tail_on_junction: bool


class ProbeReport(msgspec.Struct, frozen=True):
    """What a probe found, and against which server."""

    schema_version: int
    model: str
    vllm_version: str
    prefix_tokens: int
    tail_tokens: int
    scheduler_block_tokens: int
    eagle: bool
    seed: int
    rows: list[ProbeRow]


@dataclass(frozen=True)
class ServerFacts:
    """What the probe needs to know of the server."""

    model: str
    vllm_version: str
    block_tokens: int
    eagle: bool
    max_model_tokens: int


class ServerUnderProbe:
    """HTTP to one vLLM server."""

    def __init__(self, base_url: str, timeout_seconds: float = 600.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._http = httpx.Client(base_url=self._base_url, timeout=timeout_seconds)

    def facts(self) -> ServerFacts:
        """Ask the server about itself.

        Raises:
            ProbeError: It is unreachable, lacks dev mode or lacks the connector.
        """
        try:
            answer = self._http.get("/server_info", params={"config_format": "json"})
        except httpx.HTTPError as error:
            raise ProbeError(
                f"No server answers at {self._base_url} ({error}); start one, e.g. "
                f"{_HOW_TO_START}"
            ) from error
        if answer.status_code == 404:
            raise ProbeError(
                f"The server at {self._base_url} runs without dev mode, which the "
                f"probe needs to reset its cache; start it as {_HOW_TO_START}"
            )
        answer.raise_for_status()
        config = answer.json()["vllm_config"]
        transfer = config.get("kv_transfer_config")
        if not _selects_connector(transfer):
            raise ProbeError(
                f"The server at {self._base_url} runs without {_CONNECTOR}, so "
                f"nothing can hit a store; start it as {_HOW_TO_START}"
            )
        cache = config["cache_config"]
        model = config["model_config"]
        return ServerFacts(
            model=model["served_model_name"],
            vllm_version=self._http.get("/version").json()["version"],
            block_tokens=scheduler_block_tokens(cache),
            eagle=_drops_eagle_block(config.get("speculative_config")),
            max_model_tokens=model["max_model_len"],
        )

    def reset_local_cache(self) -> None:
        """Reset the local prefix cache once all saves have landed.

        The server refuses while a save still holds blocks, so its consent says
        both: nothing is under way any more, and nothing is cached locally.

        Raises:
            ProbeError: It refused for longer than the time-out.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while not self._http.post("/reset_prefix_cache").json()["success"]:
            if time.monotonic() > deadline:
                raise ProbeError(
                    "The server still refuses to reset its prefix cache after "
                    f"{self._timeout_seconds:.0f} s: saves to the store hang, or "
                    "other requests are running; look at its log"
                )
            time.sleep(0.05)

    def counters(self) -> dict[str, float]:
        """Return the hit counters, summed over engines."""
        names = (_LOCAL_QUERIES, _LOCAL_HITS, _STORE_HITS)
        totals = metric_totals(self._http.get("/metrics").text, names)
        return {name: totals.get(name, 0.0) for name in names}

    def first_token_seconds(
        self, model: str, prompt: list[int], declared: list[int] | None = None
    ) -> float:
        """Send a prompt of token ids; return the time to its first token.

        ``declared`` are positions up to which later prompts will share with it.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if declared is not None:
            body["kv_transfer_params"] = {"junctions": declared}
        start = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                raise ProbeError(
                    f"The server refused a request of {len(prompt)} tokens: "
                    f"{answer.read().decode()[:500]}"
                )
            seconds = None
            for line in answer.iter_lines():
                if seconds is None and line.startswith("data: {"):
                    seconds = time.perf_counter() - start
        if seconds is None:
            raise ProbeError("The server answered a request without any token")
        return seconds

    def hits_since(
        self, before: dict[str, float], prompt_tokens: int
    ) -> tuple[int, int]:
        """Return local and store hit of the one request sent since ``before``.

        Args:
            before: The counters before the request.
            prompt_tokens: Its length; the counters must account for all of it.

        Raises:
            ProbeError: They do not, so the hits cannot be told apart from others'.
        """
        deadline = time.monotonic() + 30
        while True:
            now = self.counters()
            gained = {name: int(now[name] - before[name]) for name in now}
            if gained[_LOCAL_QUERIES] == prompt_tokens:
                return gained[_LOCAL_HITS], gained[_STORE_HITS]
            if gained[_LOCAL_QUERIES] > prompt_tokens or time.monotonic() > deadline:
                raise ProbeError(
                    f"The server counted {gained[_LOCAL_QUERIES]} looked-up tokens "
                    f"for a request of {prompt_tokens}: prefix caching is off, or "
                    "others use the server, and hits cannot be told apart"
                )
            time.sleep(0.05)

    def measured(
        self, model: str, prompt: list[int], declared: list[int] | None = None
    ) -> tuple[int, int, float]:
        """Send a prompt; return its local hit, store hit and time to first token."""
        before = self.counters()
        seconds = self.first_token_seconds(model, prompt, declared)
        return *self.hits_since(before, len(prompt)), seconds


_HOW_TO_START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --kv-transfer-config "
    '\'{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both"}\''
)


def scheduler_block_tokens(cache_config: Mapping[str, Any]) -> int:
    """Return the tokens per scheduler block, as far as a server tells; 0: it does not.

    Args:
        cache_config: From ``/server_info``.
    """
    return max(
        cache_config.get("block_size") or 0,
        cache_config.get("effective_attention_block_size") or 0,
    )


def metric_totals(text: str, names: Container[str]) -> dict[str, float]:
    """Return the named Prometheus counters, summed over labels, as far as present."""
    return {
        family.name: sum(
            sample.value for sample in family.samples if sample.name.endswith("_total")
        )
        for family in text_string_to_metric_families(text)
        if family.name in names
    }


def _selects_connector(transfer: Any) -> bool:
    if not transfer:
        return False
    children = transfer.get("kv_connector_extra_config", {}).get("connectors", [])
    return _CONNECTOR in (
        transfer.get("kv_connector"),
        *(child.get("kv_connector") for child in children),
    )


def _drops_eagle_block(speculative: Any) -> bool:
    if not speculative or speculative.get("disable_eagle_block_drop"):
        return False
    method = speculative.get("method") or ""
    return "eagle" in method or "mtp" in method


def replay_tails(prompt_tokens: int, block_tokens: int, eagle: bool) -> set[int]:
    """Return where a prompt's own replay tails lie, in tokens.

    4448 tokens in blocks of 256 give ``{4352}``, with EAGLE ``{4096}``.
    """
    ends = {
        (prompt_tokens - 1) // block_tokens * block_tokens,
        prompt_tokens // block_tokens * block_tokens,
    }
    return {max(end - block_tokens * eagle, 0) for end in ends}


def _random_ids(rng: random.Random, count: int, limits: tuple[int, int]) -> list[int]:
    return [rng.randrange(*limits) for _ in range(count)]


def build_prompts(
    args: argparse.Namespace, block_tokens: int, diverge_tokens: int
) -> dict[str, list[int]]:
    """Return the prompts by name: A and its siblings, as token ids."""
    rng = random.Random(f"{args.seed}/{diverge_tokens}")
    limits = (args.first_token_id, args.last_token_id + 1)
    shared = _random_ids(rng, args.prefix_tokens + diverge_tokens, limits)
    prompts = {"A": shared + _random_ids(rng, args.first_tail_tokens, limits)}
    for index, name in enumerate(_SIBLINGS):
        # Of different lengths, so that no two replay tails coincide by design.
        tail_tokens = args.tail_tokens + 7 * index
        prompts[name] = shared + _random_ids(rng, tail_tokens, limits)
    return prompts


def probe(args: argparse.Namespace) -> ProbeReport:
    """Run the probe.

    Raises:
        ProbeError: The server cannot be probed.
    """
    server = ServerUnderProbe(args.base_url, args.timeout)
    facts = server.facts()
    block_tokens = args.block_tokens or facts.block_tokens
    if args.tail_tokens is None:
        args.tail_tokens = max(600, 2 * block_tokens + 88)
    if args.first_tail_tokens is None:
        args.first_tail_tokens = max(1400, 3 * block_tokens + 88)
    longest = args.prefix_tokens + max(args.diverge) + args.first_tail_tokens
    if longest >= facts.max_model_tokens:
        raise ProbeError(
            f"The longest prompt has {longest} tokens, the server takes "
            f"{facts.max_model_tokens}; give a smaller --prefix-tokens"
        )
    rows = []
    bar = tqdm(total=5 * len(args.diverge), desc="junction probe", unit="request")
    with bar:
        for diverge_tokens in args.diverge:
            prompts = build_prompts(args, block_tokens, diverge_tokens)
            shared_tokens = args.prefix_tokens + diverge_tokens
            for name in (*prompts, "A again"):
                prompt = prompts[name.removesuffix(" again")]
                server.reset_local_cache()
                declared = [shared_tokens] if args.declare and name == "A" else None
                local, store, seconds = server.measured(facts.model, prompt, declared)
                tails = replay_tails(len(prompt), block_tokens, facts.eagle)
                rows.append(
                    ProbeRow(
                        name=name,
                        diverge_tokens=diverge_tokens,
                        prompt_tokens=len(prompt),
                        local_hit_tokens=local,
                        store_hit_tokens=store,
                        ttft_seconds=seconds,
                        shared_tokens=shared_tokens,
                        own_tail_on_junction=min(tails) <= shared_tokens,
                    )
                )
                bar.update()
    server.reset_local_cache()
    return ProbeReport(
        schema_version=SCHEMA_VERSION,
        model=facts.model,
        vllm_version=facts.vllm_version,
        prefix_tokens=args.prefix_tokens,
        tail_tokens=args.tail_tokens,
        scheduler_block_tokens=block_tokens,
        eagle=facts.eagle,
        seed=args.seed,
        rows=rows,
    )


def print_report(report: ProbeReport, console: Console) -> None:
    """Print the rows as a table, and what can and cannot be read from them."""
    table = Table(title="Junction probe (local prefix cache reset before each request)")
    for column in ("d", "request", "prompt", "local hit", "store hit", "TTFT s", ""):
        table.add_column(column, justify="right" if column else "left")
    for row in report.rows:
        table.add_row(
            str(row.diverge_tokens),
            row.name,
            str(row.prompt_tokens),
            str(row.local_hit_tokens),
            str(row.store_hit_tokens),
            f"{row.ttft_seconds:.3f}",
            "own replay tail within the shared prefix"
            if row.own_tail_on_junction
            else "",
        )
    console.print(table)
    console.print(
        f"Scheduler block {report.scheduler_block_tokens} tokens, EAGLE/MTP "
        f"{'on' if report.eagle else 'off'}; siblings reach at least "
        f"{report.tail_tokens} tokens past the point where they part."
    )
    if any(row.own_tail_on_junction for row in report.rows):
        console.print(
            "Marked rows end so close to the shared prefix that their own replay "
            "tail serves later siblings: those hit without junctions too, by luck. "
            "Do not compare with them; a larger --tail-tokens avoids it."
        )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--prefix-tokens", type=_positive, default=3840)
    parser.add_argument(
        "--diverge",
        type=_positive,
        nargs="+",
        default=[8, 160],
        help="tokens shared past the prefix, one run each",
    )
    parser.add_argument(
        "--tail-tokens",
        type=_positive,
        help="tokens of a sibling past the shared ones; default: two scheduler "
        "blocks and a bit, at least 600",
    )
    parser.add_argument(
        "--first-tail-tokens",
        type=_positive,
        help="the same for A; default: at least 1400",
    )
    parser.add_argument(
        "--block-tokens",
        type=_positive,
        help="tokens per scheduler block, where the server does not tell it right "
        "(LCM of all groups' block sizes; its log says 'kv lcm block sizes')",
    )
    parser.add_argument(
        "--declare",
        action="store_true",
        help="A declares how far it shares: its first sibling can hit there",
    )
    parser.add_argument("--first-token-id", type=_positive, default=100)
    parser.add_argument("--last-token-id", type=_positive, default=999)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of tokens")
    return value


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        report = probe(args)
    except (ProbeError, httpx.HTTPError) as error:
        print(f"junction probe: {error}", file=sys.stderr)
        return 1
    print_report(report, Console())
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

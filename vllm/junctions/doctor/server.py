# SPDX-License-Identifier: Apache-2.0
"""Why a running server does not hit, from its ``/metrics``."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from vllm.junctions.doctor.findings import Finding, fail, ok, warn
from vllm.junctions.lookup_report import LookupOutcome
from vllm.junctions.metrics import FAULTS, INFO, LOOKUPS, TAILS_SKIPPED

_SECONDS = 10.0
_AGREE = ("hash_root", "block_tokens", "hash_tokens")


@dataclass
class ServerMetrics:
    """What a server has counted since it started.

    Attributes:
        base_url: Where it listens.
        samples: Metric name, then labels and value of each sample.
    """

    base_url: str
    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, base_url: str, text: str) -> "ServerMetrics":
        """Read the text of ``/metrics``."""
        metrics = cls(base_url)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found = metrics.samples.setdefault(sample.name, [])
                found.append((sample.labels, sample.value))
        return metrics

    def total(self, name: str, **labels: str) -> float:
        """Sum the samples of a metric that have these labels."""
        return sum(
            value
            for found, value in self.samples.get(name, [])
            if labels.items() <= found.items()
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric, summed by one of its labels."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, []):
            sums[labels[label]] = sums.get(labels[label], 0) + value
        return sums

    @property
    def info(self) -> dict[str, str]:
        """Labels of the information metric; empty before the first request."""
        samples = self.samples.get(INFO.name)
        return samples[-1][0] if samples else {}


def check_servers(
    base_urls: Sequence[str], prompts: Sequence[str] = ()
) -> Iterator[Finding]:
    """Explain the hits of running servers, and compare the servers.

    Args:
        base_urls: Where they listen, e.g. ``http://127.0.0.1:8000``.
        prompts: Files with prompts that should share a prefix: text, or a JSON
            list of token ids.
    """
    servers = []
    for base_url in base_urls:
        try:
            text = _get(f"{base_url.rstrip('/')}/metrics")
        except (OSError, ValueError) as error:
            yield fail(base_url, f"/metrics cannot be read ({error})", "start it")
            continue
        servers.append(ServerMetrics.parse(base_url, text))
        yield from explain_hits(servers[-1])
    yield from compare(servers)
    if prompts and servers:
        yield from check_prompts(servers[0], prompts)


def explain_hits(server: ServerMetrics) -> Iterator[Finding]:
    """Say whether a server's lookups hit, and if not, why."""
    url = server.base_url
    if LOOKUPS.name not in server.samples:
        yield fail(
            url,
            f"no {LOOKUPS.name} in /metrics: junctions are off or not loaded",
            "look for a line with 'vllm-junctions' in the server's log; set "
            '"junctions": true; install vllm-junctions where the server runs',
        )
        return
    outcomes = server.by_label(LOOKUPS.name, "outcome")
    total = int(sum(outcomes.values()))
    hits = int(outcomes.get(LookupOutcome.HIT.value, 0))
    if not total:
        yield warn(
            url,
            "no lookup so far",
            "send requests; with enable_lookup false there never is one",
        )
    elif hits:
        yield ok(url, f"{hits} of {total} lookups hit")
    else:
        yield from _explain_zero(server, outcomes, total)
    yield from _faults(server, outcomes, total)


def _explain_zero(
    server: ServerMetrics, outcomes: dict[str, float], total: int
) -> Iterator[Finding]:
    url = server.base_url
    block = server.info.get("block_tokens", "?")
    counts = {LookupOutcome(name): int(n) for name, n in outcomes.items() if n}
    if number := counts.get(LookupOutcome.TOO_SHORT):
        yield warn(
            url,
            f"no hit: {number} of {total} prompts are shorter than one scheduler block "
            f"of {block} tokens",
            "such prompts cannot hit",
        )
    if number := counts.get(LookupOutcome.TAIL_MISSING):
        skipped = int(server.total(TAILS_SKIPPED.name))
        yield warn(
            url,
            f"no hit: {number} of {total} lookups found a prefix without its tail "
            f"({skipped} tail blocks were gone before their save)",
            "the first sibling pays and saves the tail, the next one hits; if none "
            "does, see 'Explain one lookup' in the README",
        )
    if number := counts.get(LookupOutcome.NOTHING_STORED):
        yield from _nothing_stored(server, number, total, block)


def _nothing_stored(
    server: ServerMetrics, number: int, total: int, block: str
) -> Iterator[Finding]:
    url = server.base_url
    saved = int(
        server.total("vllm:mooncake_store_operation_keys_total", operation="save_put")
        - server.total(
            "vllm:mooncake_store_operation_failed_keys_total", operation="save_put"
        )
    )
    root = server.info.get("hash_root", "?")
    yield warn(
        url,
        f"no hit: {number} of {total} lookups found nothing stored; this server saved "
        f"{saved} keys; scheduler block {block} tokens, hash root {root}",
        f"(1) prompts that share less than {block} tokens cannot hit: compare two "
        "with --prompt FILE --prompt FILE; (2) instances with different hash roots "
        "(PYTHONHASHSEED) never hit each other's keys: give --base-url of each; (3) "
        "with nothing saved, check kv_role and the log",
    )


def _faults(
    server: ServerMetrics, outcomes: dict[str, float], total: int
) -> Iterator[Finding]:
    failed = int(
        outcomes.get(LookupOutcome.ERROR.value, 0)
        + outcomes.get(LookupOutcome.TIMEOUT.value, 0)
    )
    if failed:
        yield fail(
            server.base_url,
            f"{failed} of {total} lookups failed: the store or its master does not "
            "answer",
            "start mooncake_master, then the server; run the doctor with the server's "
            "MOONCAKE_CONFIG_PATH",
        )
    for kind, count in server.by_label(FAULTS.name, "kind").items():
        if count:
            yield warn(
                server.base_url,
                f"{int(count)} faults of kind {kind}",
                "the first of them is in the server's log",
            )


def compare(servers: Sequence[ServerMetrics]) -> Iterator[Finding]:
    """Say whether servers can hit each other's keys."""
    if len(servers) < 2:
        return
    told = [server for server in servers if server.info]
    for server in servers:
        if not server.info:
            yield warn(
                server.base_url,
                f"no {INFO.name} yet, so it cannot be compared",
                "send it one request",
            )
    for label in _AGREE:
        found = {server.base_url: server.info[label] for server in told}
        if len(set(found.values())) > 1:
            mend = (
                "same PYTHONHASHSEED and --prefix-caching-hash-algo on all"
                if label == "hash_root"
                else "same model, --block-size and speculative settings on all"
            )
            listed = ", ".join(f"{url} {value}" for url, value in found.items())
            yield fail(
                "instances", f"{label} differs ({listed}): they share no hit", mend
            )
        elif len(told) > 1:
            yield ok("instances", f"same {label}: {found[told[0].base_url]}")


def check_prompts(server: ServerMetrics, files: Sequence[str]) -> Iterator[Finding]:
    """Say how much of a prefix prompts share, in tokens and in blocks."""
    subject = "prompts"
    try:
        tokens = [_tokens(server, file) for file in files]
    except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
        yield fail(
            subject,
            f"cannot be read or tokenized ({error})",
            "give text, or a JSON list of token ids; text needs a server with a "
            "tokenizer",
        )
        return
    shared = 0
    for ids in zip(*tokens, strict=False):
        if len(set(ids)) > 1:
            break
        shared += 1
    if not server.info:
        yield warn(subject, f"they share {shared} tokens", "send the server a request")
        return
    block = int(server.info["block_tokens"])
    if shared < block:
        yield fail(
            subject,
            f"they share {shared} tokens, less than one scheduler block of {block}: "
            "they cannot hit",
            "put what they share first, and make it longer",
        )
    else:
        yield ok(
            subject,
            f"they share {shared} tokens; at most {shared // block * block} can hit "
            "(with EAGLE or MTP a block less)",
        )


def _tokens(server: ServerMetrics, file: str) -> list[int]:
    with open(file, "rb") as opened:
        content = opened.read()
    if content.lstrip().startswith(b"["):
        return msgspec.json.decode(content, type=list[int])
    model = next(iter(server.by_label(LOOKUPS.name, "model_name")))
    body = {"model": model, "prompt": content.decode()}
    answer = _get(f"{server.base_url.rstrip('/')}/tokenize", msgspec.json.encode(body))
    tokens: list[int] = msgspec.json.decode(answer)["tokens"]
    return tokens


def _get(url: str, body: bytes | None = None) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is no http address")
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answers {error.code}") from error

# SPDX-License-Identifier: Apache-2.0
"""Why a running server does not hit, from its ``/metrics``."""

import os
from collections.abc import Iterator, Sequence

from vllm.junctions.doctor.findings import Finding, fail, ok, warn
from vllm.junctions.doctor.installation import check_hash_seed
from vllm.junctions.doctor.prompts import check_prompts
from vllm.junctions.doctor.reading import NoHttpAddressError, ServerMetrics, get
from vllm.junctions.metrics.counted import FAULTS, INFO, LOOKUPS, TAILS_SKIPPED
from vllm.junctions.metrics.lookup_report import LookupOutcome

_AGREE = ("hash_root", "block_tokens", "hash_tokens")
_STOCK = "vllm:mooncake_store_"
_STOCK_KEYS = f"{_STOCK}operation_keys_total"
_STOCK_FAILED_KEYS = f"{_STOCK}operation_failed_keys_total"


def check_servers(
    base_urls: Sequence[str],
    prompts: Sequence[str] = (),
    is_server_environment: bool = False,
) -> Iterator[Finding]:
    """Explain the hits of running servers, and compare the servers.

    Args:
        base_urls: Where they listen, e.g. ``http://127.0.0.1:8000``.
        prompts: Files with prompts that should share a prefix: text, or a JSON
            list of token ids.
        is_server_environment: Whether this process has the environment variables
            that the servers were started with.
    """
    servers = []
    for base_url in base_urls:
        try:
            text = get(f"{base_url.rstrip('/')}/metrics")
        except NoHttpAddressError as error:
            yield fail(base_url, str(error), f"write http://{base_url}")
            continue
        except (OSError, ValueError) as error:
            yield fail(base_url, f"/metrics cannot be read ({error})", "start it")
            continue
        servers.append(ServerMetrics.parse(base_url, text))
    untold = {
        "compare two prompts with --prompt FILE --prompt FILE": len(prompts) < 2,
        "give --base-url of each instance": len(servers) < 2,
    }
    advice = [text for text, is_untold in untold.items() if is_untold]
    for server in servers:
        yield from explain_hits(server, advice)
    yield from compare(servers)
    if base_urls and is_server_environment:
        yield from check_seed_of(servers)
    if prompts and servers:
        yield from check_prompts(servers, prompts)
    elif prompts:
        yield warn("prompts", "not compared: no server could be read", "see above")


def explain_hits(
    server: ServerMetrics, advice: Sequence[str] = ()
) -> Iterator[Finding]:
    """Say whether a server's lookups hit, and if not, why.

    Args:
        server: The server.
        advice: What else to ask the doctor when nothing was stored.
    """
    url = server.base_url
    if not server.has_junctions:
        yield _off(server)
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
        yield from _explain_zero(server, outcomes, total, advice)
    yield from _faults(server, outcomes, total)


def _off(server: ServerMetrics) -> Finding:
    text = f"no {LOOKUPS.name} in /metrics: junctions are off or not loaded"
    if any(name.startswith(_STOCK) for name in server.samples):
        return fail(
            server.base_url,
            f"{text}; MooncakeStoreConnector runs there as stock",
            'if it was started with "junctions": false, remove that; if not, run the '
            "doctor where it runs: vllm-junctions is not installed there, or "
            "VLLM_PLUGINS leaves it out (vLLM's Rust front-end shows no metrics of it)",
        )
    return fail(
        server.base_url,
        f"{text}; nothing of MooncakeStoreConnector either",
        "select it with --kv-transfer-config, send a request, ask again; a server "
        "that has it logs a line with 'vllm-junctions' when it starts",
    )


def _explain_zero(
    server: ServerMetrics,
    outcomes: dict[str, float],
    total: int,
    advice: Sequence[str],
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
            "does, see 'Explain one lookup' in docs/metrics.md",
        )
    if number := counts.get(LookupOutcome.NOTHING_STORED):
        yield _nothing_stored(server, number, total, block, advice)


def _nothing_stored(
    server: ServerMetrics, number: int, total: int, block: str, advice: Sequence[str]
) -> Finding:
    saved = int(_saves(server) - _failed_saves(server))
    root = server.info.get("hash_root", "?")
    causes = [
        f"prompts that share less than {block} tokens (one scheduler block), or "
        "instances with another hash root, cache_prefix, model name or master, never "
        "hit each other's keys"
    ]
    if not saved:
        causes.append("nothing was saved: check kv_role, and what is said of saves")
    return warn(
        server.base_url,
        f"no hit: {number} of {total} lookups found nothing stored; this server saved "
        f"{saved} keys; scheduler block {block} tokens, hash root {root}",
        "; ".join([*causes, *advice]),
    )


def _saves(server: ServerMetrics) -> float:
    return server.total(_STOCK_KEYS, operation="save_put")


def _failed_saves(server: ServerMetrics) -> float:
    return server.total(_STOCK_FAILED_KEYS, operation="save_put")


def _faults(
    server: ServerMetrics, outcomes: dict[str, float], total: int
) -> Iterator[Finding]:
    failed = int(outcomes.get(LookupOutcome.ERROR.value, 0))
    late = int(outcomes.get(LookupOutcome.TIMEOUT.value, 0))
    if failed or late:
        yield fail(
            server.base_url,
            f"of {total} counted lookups, {failed} failed and {late} were not answered "
            "in time: the store or its master did not answer",
            "start mooncake_master: servers that ran when it died find the new one by "
            "themselves; run the doctor with the server's MOONCAKE_CONFIG_PATH",
        )
    if unsaved := int(_failed_saves(server)):
        yield warn(
            server.base_url,
            f"{unsaved} of {int(_saves(server))} keys could not be saved",
            "the store is full, or did not answer: see the master's log",
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
    yield from _compare_cache_dtypes(servers)
    told = [server for server in servers if server.info]
    for server in servers:
        if server.has_junctions and not server.info:
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


def _compare_cache_dtypes(servers: Sequence[ServerMetrics]) -> Iterator[Finding]:
    """Say whether servers read each other's bytes as what they are.

    Keys do not name the format, and values of one size pass for each other.
    """
    found = {
        server.base_url: labels["cache_dtype"]
        for server in servers
        for labels, _ in server.samples.get("vllm:cache_config_info", [])
        if "cache_dtype" in labels
    }
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{url} {value}" for url, value in found.items())
        yield fail(
            "instances",
            f"cache_dtype differs ({listed}), and they share keys: one may read the "
            "other's KV as something else",
            "same --kv-cache-dtype on all, or a cache_prefix for each",
        )


def check_seed_of(servers: Sequence[ServerMetrics]) -> Iterator[Finding]:
    """Say whether a server started from this environment would hit what others save."""
    told = [server for server in servers if server.info]
    algorithms = {
        labels.get("prefix_caching_hash_algo", "unknown")
        for server in told
        for labels, _ in server.samples.get("vllm:cache_config_info", [])
    }
    if len(algorithms) != 1 or "unknown" in algorithms:
        yield from check_hash_seed()
        return
    (algorithm,) = algorithms
    seed = os.environ.get("PYTHONHASHSEED")
    here = _hash_root_here(algorithm)
    text = (
        f"PYTHONHASHSEED {'unset' if seed is None else f'= {seed}'} here ({algorithm}) "
        f"makes hash root {here}"
    )
    others = [server for server in told if server.info["hash_root"] != here]
    if others:
        yield warn(
            "hash seed",
            f"{text}, which {', '.join(one.base_url for one in others)} "
            f"{'has' if len(others) == 1 else 'have'} not",
            "nothing, if this is not the environment of those servers; else the same "
            "PYTHONHASHSEED everywhere",
        )
    else:
        yield ok("hash seed", f"{text}, as on the servers")


def _hash_root_here(algorithm: str) -> str:
    """Return the root of the hash chain of an engine started from this environment.

    Makes it this process's own root; the doctor hashes nothing else.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from vllm.junctions.store.scheduler import hash_root

    init_none_hash(get_hash_fn_by_name(algorithm))
    return hash_root()

# SPDX-License-Identifier: Apache-2.0
"""Zero hits explained from real ``/metrics`` text, served by a plain HTTP server."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm.junctions.doctor.findings import Finding, Level
from vllm.junctions.doctor.server import check_servers
from vllm.junctions.metrics.counted import INFO, TAILS_SKIPPED, JunctionCounters
from vllm.junctions.metrics.exported import JunctionConnectorStats, JunctionPromMetrics
from vllm.junctions.metrics.lookup_report import LookupOutcome
from vllm.junctions.store.scheduler import hash_root

_TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


def _metrics(
    outcomes: dict[LookupOutcome, int],
    hash_root: str | None = "aa",
    block: int = 64,
    skipped: int = 0,
    faults: int = 0,
) -> str:
    """What a server with this past shows."""
    unregister_vllm_metrics()
    config = SimpleNamespace(kv_transfer_config=None)
    prom = JunctionPromMetrics(
        config, _TYPES, ["model_name", "engine"], {0: ["m", "0"]}
    )
    counters = JunctionCounters()
    for outcome, number in outcomes.items():
        for _ in range(number):
            counters.add_lookup(outcome)
    if hash_root is not None:
        counters.observe(INFO, 1, "1", str(block), "4", hash_root)
    counters.add(TAILS_SKIPPED, skipped)
    if faults:
        counters.add_fault("dropped_entries", "Dropped.", faults)
    prom.observe(JunctionConnectorStats.of(None, counters).data)
    text = generate_latest().decode()
    unregister_vllm_metrics()
    return text


@pytest.fixture
def serve() -> Iterator[Callable[[str], str]]:
    """Serves a text as ``/metrics`` and a tokenizer of one token a word."""
    servers = []

    def start(text: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def _answer(self, body: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                known = self.path == "/metrics"
                self._answer(text.encode(), 200 if known else 404)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                prompt = json.loads(self.rfile.read(length))["prompt"]
                tokens = [len(word) for word in prompt.split()]
                self._answer(json.dumps({"tokens": tokens}).encode())

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _check(serve, *texts: str, prompts=()) -> list[Finding]:
    return list(check_servers([serve(text) for text in texts], prompts))


def _only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_server_that_hits_is_well(serve):
    found = _only(
        _check(serve, _metrics({LookupOutcome.HIT: 2, LookupOutcome.TAIL_MISSING: 1}))
    )
    assert (found.level, found.text) == (Level.OK, "2 of 3 lookups hit")


def test_a_server_with_junctions_off(serve):
    found = _only(_check(serve, "# TYPE vllm:prompt_tokens_total counter\n"))
    assert found.level is Level.FAIL
    assert "junctions are off or not loaded" in found.text


def test_a_server_that_runs_the_stock_connector(serve):
    """Told apart from one without any; and nothing else is asked of it."""
    stock = 'vllm:mooncake_store_operation_keys_total{operation="save_put"} 5.0\n'
    found = _check(serve, stock, stock)
    assert len(found) == 2
    assert "runs there as stock" in found[0].text
    assert '"junctions": false' in found[0].mend
    none = _only(_check(serve, "vllm:prompt_tokens_total 5.0\n"))
    assert "nothing of MooncakeStoreConnector either" in none.text


def test_a_server_that_was_asked_nothing(serve):
    found = _only(_check(serve, _metrics({})))
    assert (found.level, found.text) == (Level.WARN, "no lookup so far")


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (LookupOutcome.ERROR, "of 3 counted lookups, 3 failed and 0 were not answered"),
        (LookupOutcome.TIMEOUT, "of 3 counted lookups, 0 failed and 3 were not answer"),
    ],
)
def test_a_server_whose_store_does_not_answer(serve, outcome, text):
    found = _only(_check(serve, _metrics({outcome: 3})))
    assert found.level is Level.FAIL
    assert text in found.text


def test_failures_are_said_beside_hits(serve):
    found = _check(serve, _metrics({LookupOutcome.HIT: 1, LookupOutcome.ERROR: 1}))
    assert [f.level for f in found] == [Level.OK, Level.FAIL]


def test_prompts_below_a_block(serve):
    found = _only(_check(serve, _metrics({LookupOutcome.TOO_SHORT: 4})))
    assert found.level is Level.WARN
    assert "4 of 4 prompts are shorter than one scheduler block of 64" in found.text


def test_a_prefix_without_its_tail(serve):
    found = _only(_check(serve, _metrics({LookupOutcome.TAIL_MISSING: 1}, skipped=5)))
    assert "5 tail blocks were gone" in found.text


def test_nothing_stored_names_block_and_hash_root(serve):
    found = _only(_check(serve, _metrics({LookupOutcome.NOTHING_STORED: 2})))
    assert found.level is Level.WARN
    assert "scheduler block 64 tokens, hash root aa" in found.text
    assert "--prompt" in found.mend
    assert "--base-url of each" in found.mend


def test_nothing_is_advised_that_has_been_done(serve, tmp_path):
    nothing = _metrics({LookupOutcome.NOTHING_STORED: 2})
    files = _prompts(tmp_path, "[1]", "[1]")
    found = _check(serve, nothing, nothing, prompts=files)
    assert "--" not in found[0].mend


def test_keys_that_could_not_be_saved_are_said(serve):
    name = "vllm:mooncake_store_operation"
    label = '{operation="save_put"}'
    text = f"{name}_keys_total{label} 9.0\n{name}_failed_keys_total{label} 8.0\n"
    found = _check(serve, _metrics({LookupOutcome.HIT: 1}) + text)[-1]
    assert (found.level, found.text) == (Level.WARN, "8 of 9 keys could not be saved")


def test_instances_with_different_hash_roots(serve):
    nothing = {LookupOutcome.NOTHING_STORED: 2}
    found = _check(serve, _metrics(nothing), _metrics(nothing, hash_root="bb"))
    failed = [f for f in found if f.level is Level.FAIL]
    assert "hash_root differs" in _only(failed).text
    assert "PYTHONHASHSEED" in _only(failed).mend


def test_instances_with_different_kv_formats_share_keys(serve):
    nothing = _metrics({LookupOutcome.NOTHING_STORED: 2})
    texts = [
        nothing + f'vllm:cache_config_info{{cache_dtype="{dtype}"}} 1.0\n'
        for dtype in ("fp8_e4m3", "fp8_e5m2")
    ]
    failed = [f for f in _check(serve, *texts) if f.level is Level.FAIL]
    assert "cache_dtype differs" in _only(failed).text
    same = [f for f in _check(serve, texts[0], texts[0]) if f.level is Level.FAIL]
    assert same == []


def test_instances_that_agree(serve):
    nothing = {LookupOutcome.NOTHING_STORED: 2}
    found = _check(serve, _metrics(nothing), _metrics(nothing))
    assert [f.text for f in found if f.level is Level.OK] == [
        "same hash_root: aa",
        "same block_tokens: 64",
        "same hash_tokens: 4",
    ]


def test_instances_of_different_blocks(serve):
    hit = {LookupOutcome.HIT: 1}
    found = _check(serve, _metrics(hit), _metrics(hit, block=128))
    assert (
        "block_tokens differs"
        in _only([f for f in found if f.level is Level.FAIL]).text
    )


def test_an_instance_that_has_told_nothing_yet_is_not_compared(serve):
    hit = {LookupOutcome.HIT: 1}
    found = _check(serve, _metrics(hit), _metrics(hit, hash_root=None))
    assert (
        "cannot be compared" in _only([f for f in found if f.level is Level.WARN]).text
    )


def test_faults_are_listed(serve):
    found = _check(serve, _metrics({LookupOutcome.HIT: 1}, faults=7))
    assert found[-1].text == "7 faults of kind dropped_entries"


def test_a_server_that_is_not_there(serve):
    found = _only(list(check_servers(["http://127.0.0.1:9"])))
    assert found.level is Level.FAIL
    assert _only(list(check_servers(["file:///etc/passwd"]))).level is Level.FAIL


def test_an_address_without_its_scheme_is_not_taken_for_a_dead_server():
    found = _only(list(check_servers(["127.0.0.1:8000"])))
    assert (found.text, found.mend) == (
        "is no http address",
        "write http://127.0.0.1:8000",
    )


def test_prompts_are_not_dropped_in_silence_where_no_server_answers(tmp_path):
    files = _prompts(tmp_path, "[1]", "[1]")
    found = list(check_servers(["http://127.0.0.1:9"], files))[-1]
    assert (found.subject, found.level) == ("prompts", Level.WARN)


@pytest.mark.parametrize(("seed", "level"), [("7", Level.OK), ("8", Level.WARN)])
def test_the_seed_of_this_environment_is_compared_with_the_servers(
    serve, monkeypatch, seed, level
):
    """With the root that vLLM itself makes of a seed and an algorithm."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    text = _metrics({LookupOutcome.HIT: 1}, hash_root=hash_root())
    text += 'vllm:cache_config_info{prefix_caching_hash_algo="sha256"} 1.0\n'
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    found = list(check_servers([serve(text)], is_server_environment=True))[-1]
    assert (found.subject, found.level) == ("hash seed", level)
    assert f"PYTHONHASHSEED = {seed} here (sha256)" in found.text


def _prompts(tmp_path, *contents: str) -> list[str]:
    paths = [tmp_path / f"{index}" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    return [str(path) for path in paths]


@pytest.mark.parametrize(("shared", "level"), [(63, Level.FAIL), (64, Level.OK)])
def test_prompts_are_compared_with_a_block(serve, tmp_path, shared, level):
    ids = list(range(shared))
    files = _prompts(tmp_path, json.dumps([*ids, 1, 2]), json.dumps([*ids, 3]))
    found = _check(serve, _metrics({LookupOutcome.HIT: 1}), prompts=files)[-1]
    assert found.level is level
    assert f"they share {shared} tokens" in found.text


def test_a_stranger_among_prompts_that_share_is_named(serve, tmp_path):
    ids = list(range(64))
    files = _prompts(tmp_path, *(json.dumps([*ids, n]) for n in (1, 2)), "[5, 6]")
    found = _check(serve, _metrics({LookupOutcome.HIT: 1}), prompts=files)[-2:]
    assert [f.level for f in found] == [Level.FAIL, Level.OK]
    assert f"{files[2]} shares 0 tokens with the others" in found[0].text
    assert "they share 64 tokens" in found[1].text


def test_one_prompt_alone_says_nothing(serve, tmp_path):
    files = _prompts(tmp_path, "[1, 2]")
    found = _check(serve, _metrics({LookupOutcome.HIT: 1}), prompts=files)[-1]
    assert (found.level, found.text) == (Level.WARN, "one alone shares nothing")


def test_prompts_are_measured_where_no_server_tells_its_block(serve, tmp_path):
    files = _prompts(tmp_path, "[1, 2, 3]", "[1, 2]")
    found = _check(serve, "vllm:prompt_tokens_total 5.0\n", prompts=files)[-1]
    assert found.level is Level.WARN
    assert "they share 2 tokens; no server tells its scheduler block" in found.text


def test_text_is_tokenized_by_the_server(serve, tmp_path):
    files = _prompts(tmp_path, "a bb ccc and more", "a bb ccc but less")
    found = _check(serve, _metrics({LookupOutcome.HIT: 1}), prompts=files)[-1]
    # "and" and "but" have equal lengths, so does this tokenizer see them.
    assert "they share 5 tokens" in found.text
    assert found.level is Level.FAIL


def test_prompts_that_cannot_be_read(serve, tmp_path):
    files = _prompts(tmp_path, "[1, 2", "[1]")
    found = _check(serve, _metrics({LookupOutcome.HIT: 1}), prompts=files)[-1]
    assert "cannot be read" in found.text

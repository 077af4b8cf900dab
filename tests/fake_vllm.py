# SPDX-License-Identifier: Apache-2.0
"""What a benchmark sees of a vLLM server, without vLLM."""

import http.server
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

_CONNECTOR = "MooncakeStoreConnector"


@dataclass
class FakeVllm:
    """Serves on loopback while its ``with`` block lasts.

    Attributes:
        hits: Local and store hit of the n-th prompt (from 0), in tokens; a token is
            a word here.
        answer: Text of the answer to a prompt.
        fails_from: Prompts from this number on are refused.
        counts_extra: Looked-up tokens of somebody else per prompt.
    """

    hits: Callable[[int, int], tuple[int, int]] = lambda number, tokens: (0, 0)
    answer: Callable[[Any], str] = lambda prompt: "so 3. #### 3"
    model: str = "fake"
    connector: bool = False
    dev_mode: bool = True
    metrics: bool = True
    fails_from: int | None = None
    counts_extra: int = 0
    prompts: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                "vllm:prefix_cache_queries",
                "vllm:prefix_cache_hits",
                "vllm:external_prefix_cache_queries",
                "vllm:external_prefix_cache_hits",
            ),
            0,
        )
    )

    def __enter__(self) -> "FakeVllm":
        fake = self

        class Handler(_Handler):
            server_behind = fake

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def metrics_text(self) -> str:
        return "".join(
            f'# TYPE {name}_total counter\n{name}_total{{engine="0"}} {float(value)}\n'
            for name, value in self.counters.items()
        )

    def complete(self, prompt: Any) -> tuple[str, int]:
        """Count a prompt, text or ids; return its answer and its length."""
        tokens = len(prompt.split() if isinstance(prompt, str) else prompt)
        local, store = self.hits(len(self.prompts), tokens)
        self.prompts.append(prompt)
        for name, value in zip(
            self.counters,
            (tokens + self.counts_extra, local, tokens - local, store),
            strict=True,
        ):
            self.counters[name] += value
        return self.answer(prompt), tokens


class _Handler(http.server.BaseHTTPRequestHandler):
    server_behind: FakeVllm

    def log_message(self, *args: object) -> None:
        pass

    def _send(self, content: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_json(self, content: Any) -> None:
        self._send(msgspec.json.encode(content))

    def do_GET(self) -> None:
        fake, path = self.server_behind, self.path.partition("?")[0]
        if path == "/v1/models":
            self._send_json({"data": [{"id": fake.model}]})
        elif path == "/version":
            self._send_json({"version": "0.0.fake"})
        elif path == "/metrics" and fake.metrics:
            self._send(fake.metrics_text().encode(), "text/plain")
        elif path == "/server_info" and fake.dev_mode:
            self._send_json(
                {
                    "vllm_config": {
                        "model_config": {
                            "dtype": "torch.float32",
                            "served_model_name": fake.model,
                            "max_model_len": 65536,
                        },
                        "cache_config": {"block_size": 32},
                        "kv_transfer_config": {"kv_connector": _CONNECTOR}
                        if fake.connector
                        else None,
                    }
                }
            )
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        fake = self.server_behind
        fake.calls.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/tokenize":
            self._send_json({"count": len(msgspec.json.decode(body)["prompt"].split())})
        elif self.path == "/reset_prefix_cache" and fake.dev_mode:
            self._send_json({"success": True})
        elif self.path == "/v1/completions":
            if fake.fails_from is not None and len(fake.prompts) >= fake.fails_from:
                self.send_error(500, "engine died")
                return
            text, tokens = fake.complete(msgspec.json.decode(body)["prompt"])
            events = [
                {"choices": [{"text": text, "finish_reason": None}]},
                {"choices": [{"text": "", "finish_reason": "stop"}]},
                {
                    "choices": [],
                    "usage": {"prompt_tokens": tokens, "completion_tokens": 2},
                },
            ]
            lines = [b"data: " + msgspec.json.encode(event) for event in events]
            self._send(b"\n\n".join([*lines, b"data: [DONE]"]), "text/event-stream")
        else:
            self.send_error(404)

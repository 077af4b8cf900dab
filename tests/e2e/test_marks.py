# SPDX-License-Identifier: Apache-2.0
"""A mark on a chat message serves the first sibling on another instance."""

import os
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from benchmarks.junction_probe import ServerUnderProbe
from testbed.chat import words
from testbed.models import GEMMA3
from testbed.server import VllmServer
from tests.e2e.client import REPETITION_VARIABLE, reset_local_cache

_MARK = {"cache_control": {"type": "ephemeral"}}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}


@pytest.fixture
def pair(trio) -> tuple[VllmServer, VllmServer]:
    """Two servers on one store that take chats."""
    return trio["one"], trio["two"]


def _documents(name: str, *questions: str, mark: dict[str, Any]) -> list[list[dict]]:
    """Chats that share a system message and a document, marked, and no question."""
    seed = name + os.environ.get(REPETITION_VARIABLE, "")
    document = {"type": "text", "text": words(seed, 900) + ".", **mark}
    return [
        [
            # Its own from the first block on.
            {"role": "system", "content": f"{words((seed, 1), 4)}: answer from it."},
            {
                "role": "user",
                "content": [
                    document,
                    {"type": "text", "text": f"{question} {words(question, 200)}"},
                ],
            },
        ]
        for question in questions
    ]


def _post(server: VllmServer, path: str, **body: Any) -> httpx.Response:
    reply = httpx.post(
        f"{server.base_url}{path}", json={"model": server.model, **body}, timeout=300
    )
    assert reply.is_success, reply.text
    return reply


def _token_ids(server: VllmServer, messages: list[dict]) -> list[int]:
    return _post(server, "/tokenize", messages=messages).json()["tokens"]


def _shared_tokens(server: VllmServer, one: list[dict], other: list[dict]) -> int:
    ids = zip(_token_ids(server, one), _token_ids(server, other), strict=False)
    return next(n for n, (a, b) in enumerate(ids) if a != b)


def _ask(server: VllmServer, messages: list[dict], **fields: Any) -> tuple[int, str]:
    """Return the tokens that a chat hit in the store, and the server's answer."""
    num_tokens = len(_token_ids(server, messages))
    probe = ServerUnderProbe(server.base_url)
    before = probe.counters()
    reply = _post(
        server, "/v1/chat/completions", messages=messages, max_tokens=4, **fields
    )
    local, store = probe.hits_since(before, num_tokens)
    assert local == 0
    return store, reply.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "mark",
    [_MARK, {"prompt_cache_breakpoint": {"mode": "explicit"}}],
    ids=["anthropic", "openai"],
)
def test_the_first_sibling_of_a_marked_document_hits_elsewhere(pair, mark, stream):
    one, two = pair
    a, b = _documents(f"{stream}{mark}", "Why?", "Who was it?", mark=mark)
    shared = _shared_tokens(one, a, b)
    block = GEMMA3.block_tokens
    assert shared % block > 2, "the mark must not be at the edge of a block"
    fields: dict[str, Any] = {"stream": stream, "tools": [_TOOL], "tool_choice": "none"}
    assert _ask(one, a, **fields)[0] == 0
    reset_local_cache(one)  # once its saves have landed
    store, answer = _ask(two, b, **fields, **_usage(stream))
    assert store == shared // block * block > 1000
    assert f'"cached_tokens":{store}' in answer.replace(" ", "")


def test_clients_of_openai_and_anthropic_mark_as_they_do_elsewhere(pair):
    one, two = pair
    for name, ask in (("openai", _ask_openai), ("anthropic", _ask_anthropic)):
        document = words(name + os.environ.get(REPETITION_VARIABLE, ""), 900)
        ask(one, document, "Why? " + words("why", 200))
        reset_local_cache(one)
        probe = ServerUnderProbe(two.base_url)
        before = probe.counters()
        num_tokens, num_cached = ask(two, document, "Who? " + words("who", 200))
        local, store = probe.hits_since(before, num_tokens)
        assert (local, store) == (0, num_cached)
        assert num_cached > 1000


def _ask_openai(server: VllmServer, document: str, question: str) -> tuple[int, int]:
    """Return the tokens of a prompt and how many of them were cached."""
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
    content: list[Any] = [
        {
            "type": "text",
            "text": document,
            "prompt_cache_breakpoint": {"mode": "explicit"},
        },
        {"type": "text", "text": question},
    ]
    answer = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": content}],
        max_tokens=4,
    )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def _ask_anthropic(server: VllmServer, document: str, question: str) -> tuple[int, int]:
    """Likewise."""
    client = anthropic.Anthropic(base_url=server.base_url, api_key="none")
    answer = client.messages.create(
        model=server.model,
        max_tokens=4,
        system=[
            {
                "type": "text",
                "text": document,
                "cache_control": {"type": "ephemeral"},
            }
        ],
        messages=[{"role": "user", "content": question}],
    )
    usage = answer.usage
    cached = usage.cache_read_input_tokens or 0
    created = usage.cache_creation_input_tokens or 0
    return usage.input_tokens + cached + created, cached


def test_the_documented_clients_run(pair):
    one, _ = pair
    page = (Path(__file__).parents[2] / "docs" / "first-siblings.md").read_text()
    blocks = [text.partition("```")[0] for text in page.split("```python\n")[1:]]
    marked = [text for text in blocks if "cache_control" in text]
    assert len(marked) == 2
    for text in marked:
        code = text.replace("http://127.0.0.1:8000", one.base_url)
        scope: dict[str, Any] = {}
        exec(code.replace('"MODEL"', repr(one.model)), scope)
        assert scope["answer"].usage is not None


def test_without_a_mark_the_first_sibling_hits_nothing(pair):
    one, two = pair
    a, b = _documents("plain", "Why?", "Who was it?", mark={})
    _ask(one, a)
    reset_local_cache(one)
    assert _ask(two, b)[0] == 0


def test_a_bad_mark_is_served_and_counted(pair):
    one, _ = pair
    (a,) = _documents("bad", "Why?", mark={"cache_control": "please"})
    for _ in range(2):
        _post(one, "/v1/chat/completions", messages=a, max_tokens=4)
    # Metrics go out with the engine's next report.
    _post(one, "/v1/chat/completions", messages=a, max_tokens=4)
    metrics = httpx.get(f"{one.base_url}/metrics").text.splitlines()
    (line,) = (
        text
        for text in metrics
        if text.startswith("vllm:junctions_marks_total{")
        and 'outcome="malformed"' in text
    )
    assert float(line.split()[-1]) >= 1
    assert one.log().count("Ignored a mark on a chat message: cache_control") == 1
    assert "marks are read on chat messages and Anthropic messages." in one.log()


def _usage(stream: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if stream else {}

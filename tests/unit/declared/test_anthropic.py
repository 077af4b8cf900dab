# SPDX-License-Identifier: Apache-2.0
"""Anthropic requests through vLLM's own conversion, up to what their scheduler gets."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from vllm.entrypoints.anthropic import serving
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.serve import create_error_response

from testbed.chat import words
from vllm.junctions.declared import anthropic
from vllm.junctions.declared.positions import num_common_tokens

pytestmark = pytest.mark.usefixtures("marks_on", "blocks_on")

_MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def blocks_on() -> Iterator[None]:
    anthropic.HOOKS.install()
    try:
        yield
    finally:
        anthropic.HOOKS.uninstall()


class Server(serving.AnthropicServingMessages):
    """The handler with a front end and, in the place of an engine, a note."""

    def __init__(self, front_end: Any) -> None:
        self.online_renderer = front_end.online
        self._front_end = front_end
        self._merge_inline_system = False
        if hasattr(serving, "DisabledThinkingEffortResolver"):
            self.disabled_thinking_effort_resolver = (
                serving.DisabledThinkingEffortResolver(front_end.online)
            )

    async def create_chat_completion(self, request: Any, raw_request: Any) -> Any:
        _, (self.prompt,) = await self.online_renderer.render_chat(request)
        made = self._front_end.inputs.process_inputs(
            "r", self.prompt, request.to_sampling_params(8, {}), ("generate",)
        )
        self.extra_args = made.sampling_params.extra_args
        return create_error_response("served")

    def send(self, **fields: Any) -> list[int]:
        """Return the positions that a request comes to."""
        body = json.dumps({"model": "m", "max_tokens": 8, **fields}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        raw = Request({"type": "http", "method": "POST", "headers": []}, receive)
        request = AnthropicMessagesRequest.model_validate_json(body)
        asyncio.run(self.create_messages(request, raw))
        params = (self.extra_args or {}).get("kv_transfer_params", {})
        return params.get("junctions", [])


def _text(text: str, mark: dict | None = None) -> dict:
    return {"type": "text", "text": text, **(mark or {})}


def test_marks_on_system_and_messages_become_positions(make_front_end, outcomes):
    server = Server(make_front_end())
    system = [_text("Be brief. "), _text(words("s", 60), _MARK)]
    document = _text(words("doc", 200) + ".", _MARK)

    def asked(question: str, **fields: Any) -> list[int]:
        messages = [{"role": "user", "content": [document, _text(question)]}]
        return server.send(messages=messages, **fields)

    positions = asked("Why?", system=system)
    one = server.prompt["prompt_token_ids"]
    assert asked("how many", system=system) == positions
    other = server.prompt["prompt_token_ids"]
    shared = num_common_tokens(one, other)
    assert shared - 1 <= positions[1] <= shared
    asked("Why?", system=system[:1])
    first = num_common_tokens(one, server.prompt["prompt_token_ids"])
    assert first < positions[0] < positions[1]
    # One of four is a joint of the system's: it renders as one text.
    assert outcomes() == {"taken": 5}


def test_a_tool_result_can_be_marked(make_front_end):
    server = Server(make_front_end())
    messages = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [
                _text("I do."),
                {"type": "tool_use", "id": "t", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": words("found", 80),
                    **_MARK,
                },
                _text("And now?"),
            ],
        },
    ]
    (position,) = server.send(messages=messages)
    decode = make_front_end().renderer.tokenizer.decode
    ids = server.prompt["prompt_token_ids"]
    assert decode(ids[position:]).startswith("<end>\n<turn>user\nAnd now?")


def test_requests_without_marks_are_not_looked_into(make_front_end, monkeypatch):
    server = Server(make_front_end())
    looked = []
    monkeypatch.setattr(anthropic, "find_marks", looked.append)
    messages = [{"role": "user", "content": [_text("Hello.")]}]
    assert server.send(messages=messages) == []
    assert looked == []


def test_a_bad_mark_is_served_and_counted(make_front_end, outcomes):
    server = Server(make_front_end())
    content = [_text("Hello.", {"cache_control": {"type": "forever"}})]
    assert server.send(messages=[{"role": "user", "content": content}]) == []
    assert server.prompt["prompt_token_ids"]
    assert outcomes() == {"malformed": 1}

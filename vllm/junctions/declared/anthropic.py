# SPDX-License-Identifier: Apache-2.0
"""Marks of ``/v1/messages``, whose blocks lose them before they become chat messages.

vLLM turns an Anthropic request into a chat request, joining blocks and dropping what it
does not know. So the marks are read from the body as it was sent, and the request with
probes in it goes the same way beside the one without.
"""

import functools
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm.junctions.declared.activation import reads_marks
from vllm.junctions.declared.counting import count
from vllm.junctions.declared.marks import (
    ANTHROPIC_KEY,
    Marks,
    find_marks,
    with_probes,
)
from vllm.junctions.metrics.marks import MarkOutcome
from vllm.junctions.seams.registry import Hook, HookSet

_KEY_BYTES = ANTHROPIC_KEY.encode()


@dataclass
class ProbedChat:
    """An Anthropic request on its way to a chat, and its twin with probes.

    Attributes:
        marks: Of the request.
        request: The request.
        probed_request: The same with a probe at the end of each marked text.
        messages: What vLLM made of ``request``; None before it did.
        convert: Makes the same of another request.
    """

    marks: Marks
    request: Any
    probed_request: Any
    messages: Any = None
    convert: Callable[[Any], Any] | None = None

    def probed(self) -> list[Any]:
        """Return what vLLM makes of the twin."""
        assert self.convert is not None, "asked before there were messages"
        return self.convert(self.probed_request).messages


_CHAT: ContextVar[ProbedChat | None] = ContextVar("vllm_junctions_chat", default=None)


def chat_of(messages: Any) -> ProbedChat | None:
    """Return the chat that an Anthropic request with marks became; None: none did.

    Args:
        messages: As they are rendered; the very object that vLLM made.
    """
    chat = _CHAT.get()
    return chat if chat is not None and chat.messages is messages else None


def _create_messages(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def create_messages(
        self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            chat = await _read(self, request, raw_request)
        # The request itself is fine, or vLLM will say what is wrong with it.
        except Exception as error:
            count(MarkOutcome.FAILED, f" ({error!r})")
            chat = None
        if chat is None:
            return await original(self, request, raw_request, *args, **kwargs)
        token = _CHAT.set(chat)
        try:
            return await original(self, request, raw_request, *args, **kwargs)
        finally:
            _CHAT.reset(token)

    return create_messages


def _to_chat_completion_request(original: Any) -> Any:
    convert = original.__func__

    @functools.wraps(convert)
    def to_chat_completion_request(
        cls: Any, anthropic_request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        made = convert(cls, anthropic_request, *args, **kwargs)
        chat = _CHAT.get()
        if chat is not None and anthropic_request is chat.request:
            chat.messages = made.messages
            chat.convert = lambda twin: convert(cls, twin, *args, **kwargs)
        return made

    return classmethod(to_chat_completion_request)


async def _read(server: Any, request: Any, raw_request: Any) -> ProbedChat | None:
    if raw_request is None:
        return None
    # Was read to make ``request`` of it, and is kept.
    body = await raw_request.body()
    if _KEY_BYTES not in body or not reads_marks(
        server.online_renderer.renderer.config.kv_transfer_config
    ):
        return None
    # It was JSON of this form when ``request`` was made of it.
    sent = json.loads(body)
    messages = [{"role": "system", "content": sent.get("system")}, *sent["messages"]]
    marks = find_marks(messages)
    if marks is None:
        return None
    if not marks.places:
        return ProbedChat(marks, request, request)
    system, *others = with_probes(messages, marks)
    twin = sent | {"messages": others, "system": system["content"]}
    return ProbedChat(marks, request, type(request).model_validate(twin))


_SERVING = "vllm.entrypoints.anthropic.serving:AnthropicServingMessages"
_REMOVE_WHEN = "vLLM's chat messages keep the marks of Anthropic's blocks."
_GUARD = "tests/unit/declared/test_anthropic.py"
HOOKS = HookSet(
    (
        Hook(
            f"{_SERVING}.create_messages",
            ("request", "raw_request"),
            "Blocks drop cache_control as they are read.",
            "Reads marks from the body of requests that hold the name.",
            _REMOVE_WHEN,
            _GUARD,
            _create_messages,
        ),
        Hook(
            f"{_SERVING}.to_chat_completion_request",
            ("anthropic_request",),
            "Only vLLM knows what chat messages it makes of blocks.",
            "Of requests with marks, has a twin with probes made the same way.",
            _REMOVE_WHEN,
            _GUARD,
            _to_chat_completion_request,
        ),
    )
)

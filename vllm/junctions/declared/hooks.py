# SPDX-License-Identifier: Apache-2.0
"""The hooks that take marks from a chat's messages to its request's parameters.

Messages and everything that shapes their prompt meet where they are rendered; the
request's parameters are elsewhere then. So what was found travels with the rendered
prompt, to where vLLM makes an engine request of both.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm.junctions.declared.activation import reads_marks
from vllm.junctions.declared.anthropic import chat_of
from vllm.junctions.declared.counting import count
from vllm.junctions.declared.marks import find_marks, with_lists, with_probes
from vllm.junctions.declared.positions import with_marks
from vllm.junctions.declared.reader import MarkedChat, MarkReader, finish
from vllm.junctions.metrics.marks import MarkOutcome
from vllm.junctions.rules.declared import DECLARED_KEY
from vllm.junctions.seams.registry import Hook, HookSet

_RENDERER = "vllm.renderers.base:BaseRenderer"
# In an engine input; vLLM takes no more keys than it knows.
_POSITIONS = "vllm_junctions_marks"
_KV_PARAMS = "kv_transfer_params"


def _render_chat_async(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def render_chat_async(
        self: Any, conversations: Any, chat_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rendered = await original(self, conversations, chat_params, *args, **kwargs)
        for number, chat in _marked(self, conversations, kwargs):
            reader = MarkReader(self, chat_params, _tok_params(args, kwargs), True)
            await _take(reader, chat, rendered[1][number])
        return rendered

    return render_chat_async


def _render_chat(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def render_chat(
        self: Any, conversations: Any, chat_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rendered = original(self, conversations, chat_params, *args, **kwargs)
        for number, chat in _marked(self, conversations, kwargs):
            reader = MarkReader(self, chat_params, _tok_params(args, kwargs), False)
            finish(_take(reader, chat, rendered[1][number]))
        return rendered

    return render_chat


def _process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(prompt, dict) and _POSITIONS in prompt:
            params = _with_positions(params, prompt[_POSITIONS])
        return original(self, request_id, prompt, params, *args, **kwargs)

    return process_inputs


def _tok_params(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("tok_params")


def _marked(
    renderer: Any, conversations: Any, kwargs: dict[str, Any]
) -> list[tuple[int, MarkedChat]]:
    """Return number and marks of the conversations that have marks."""
    # Without a cache for media nothing is rendered for an engine.
    if kwargs.get("skip_mm_cache"):
        return []
    try:
        found = [(n, _marks_of(messages)) for n, messages in enumerate(conversations)]
    # Messages of no form that was thought of are rendered already.
    except Exception as error:
        count(MarkOutcome.FAILED, f" ({error!r})")
        return []
    marked = [(number, chat) for number, chat in found if chat is not None]
    if not marked or not reads_marks(renderer.config.kv_transfer_config):
        return []
    return marked


def _marks_of(messages: Any) -> MarkedChat | None:
    if (sent := chat_of(messages)) is not None:
        return MarkedChat(sent.marks, sent.probed)
    messages = with_lists(messages)
    marks = find_marks(messages)
    if marks is None:
        return None
    return MarkedChat(marks, lambda: with_probes(messages, marks))


async def _take(reader: MarkReader, chat: MarkedChat, engine_input: Any) -> None:
    marks = chat.marks
    outcomes: list[int | MarkOutcome] = list(marks.ignored)
    detail = ""
    if marks.places:
        try:
            outcomes += await reader.positions(chat, engine_input)
        # Whatever a template does with the probes, the request is rendered already.
        except Exception as error:
            outcomes += [MarkOutcome.FAILED] * len(marks.places)
            detail = f" ({error!r})"
    positions = [outcome for outcome in outcomes if isinstance(outcome, int)]
    for outcome in outcomes:
        count(MarkOutcome.TAKEN if isinstance(outcome, int) else outcome, detail)
    if positions:
        engine_input[_POSITIONS] = tuple(positions)


def _with_positions(params: Any, positions: tuple[int, ...]) -> Any:
    """Return a copy of sampling parameters that declares positions too."""
    if not isinstance(params, SamplingParams):
        return params
    extra_args = params.extra_args or {}
    kv_params = extra_args.get(_KV_PARAMS) or {}
    declared = with_marks(kv_params.get(DECLARED_KEY), positions)
    if declared is None:
        count(MarkOutcome.POSITIONS_UNUSABLE)
        return params
    # The caller's own object may serve other requests.
    params = copy.copy(params)
    params.extra_args = extra_args | {_KV_PARAMS: kv_params | {DECLARED_KEY: declared}}
    return params


_RENDER_PARAMETERS = ("conversations", "chat_params", "tok_params")
_WHY = "Marks on content parts end where messages become a prompt."
_HOW = (
    "Of chats with marks only: renders them once more with probes, and notes the "
    "marks' token positions in the rendered prompt."
)
_REMOVE_WHEN = "vLLM hands the positions of marked parts to connectors itself."
_GUARD = "tests/unit/declared/test_hooks.py"
HOOKS = HookSet(
    (
        Hook(
            f"{_RENDERER}.render_chat_async",
            _RENDER_PARAMETERS,
            _WHY,
            _HOW,
            _REMOVE_WHEN,
            _GUARD,
            _render_chat_async,
        ),
        Hook(
            f"{_RENDERER}.render_chat",
            _RENDER_PARAMETERS,
            _WHY,
            _HOW,
            _REMOVE_WHEN,
            _GUARD,
            _render_chat,
        ),
        Hook(
            "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
            ("request_id", "prompt", "params", "supported_tasks"),
            "A rendered prompt has no way to a request's kv_transfer_params.",
            "Adds the positions noted in a prompt to a copy of its parameters.",
            _REMOVE_WHEN,
            _GUARD,
            _process_inputs,
        ),
    )
)

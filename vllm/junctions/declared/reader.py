# SPDX-License-Identifier: Apache-2.0
"""Finds the token positions of a chat's marks, with the renderer that rendered it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.junctions.declared.marks import Marks, mark_ends
from vllm.junctions.declared.positions import KnownPositions, num_common_tokens
from vllm.junctions.metrics.marks import MarkOutcome

_KNOWN = "_vllm_junctions_known_positions"


@dataclass(frozen=True)
class MarkedChat:
    """A chat with marks.

    Attributes:
        marks: What its messages hold.
        probed: Makes the same messages with probes.
    """

    marks: Marks
    probed: Callable[[], list[Any]]


class MarkReader:
    """Renders and tokenises as one call of ``BaseRenderer.render_chat`` did.

    Args:
        renderer: The ``BaseRenderer``.
        chat_params: The call's ``ChatParams``.
        tok_params: The call's ``TokenizeParams``; None: the renderer's own.
        is_async: Whether to use the renderer's methods that wait; otherwise nothing
            here waits, see :func:`finish`.
    """

    def __init__(
        self, renderer: Any, chat_params: Any, tok_params: Any, is_async: bool
    ) -> None:
        self._renderer = renderer
        self._chat_params = chat_params
        self._tok_params = tok_params or renderer.default_chat_tok_params
        self._is_async = is_async
        # Lives as long as the renderer.
        self._known: KnownPositions = renderer.__dict__.setdefault(
            _KNOWN, KnownPositions()
        )

    async def positions(
        self, chat: MarkedChat, engine_input: Any
    ) -> list[int | MarkOutcome]:
        """Return for each place of a mark its position, in tokens, or why it has none.

        Renders the messages once more, however many marks they have, and tokenises the
        text up to each mark that is not known yet: at most four.

        Args:
            chat: What the call rendered.
            engine_input: What it made of that.
        """
        num_marks = len(chat.marks.places)
        text = engine_input.get("prompt")
        if self._tok_params.truncate_prompt_tokens is not None:
            return [MarkOutcome.TRUNCATED] * num_marks
        if engine_input.get("type") != "token" or not isinstance(text, str):
            return [MarkOutcome.NO_TEXT_PROMPT] * num_marks
        probed = (await self._render(chat.probed())).get("prompt")
        if not isinstance(probed, str):
            return [MarkOutcome.NO_TEXT_PROMPT] * num_marks
        token_ids = engine_input["prompt_token_ids"]
        return [
            end
            if isinstance(end, MarkOutcome)
            else await self._position(text[:end], token_ids)
            for end in mark_ends(text, probed, num_marks)
        ]

    async def _position(self, text: str, token_ids: list[int]) -> int | MarkOutcome:
        position = self._known.get(text, token_ids)
        if position is None:
            position = num_common_tokens(await self._tokenize(text), token_ids)
            self._known.add(text, token_ids, position)
        # No token ends before a mark that nothing precedes.
        return position or MarkOutcome.NOT_RENDERED

    async def _render(self, messages: list[Any]) -> dict[str, Any]:
        if self._is_async:
            rendered = await self._renderer.render_messages_async(
                messages, self._chat_params
            )
        else:
            rendered = self._renderer.render_messages(messages, self._chat_params)
        _, prompt = rendered
        return prompt

    async def _tokenize(self, text: str) -> list[int]:
        prompts = [{"prompt": text}]
        if self._is_async:
            tokenized = await self._renderer.tokenize_prompts_async(
                prompts, self._tok_params
            )
        else:
            tokenized = self._renderer.tokenize_prompts(prompts, self._tok_params)
        return tokenized[0]["prompt_token_ids"]


def finish(coroutine: Any) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("the coroutine waited for something")

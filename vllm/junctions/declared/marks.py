# SPDX-License-Identifier: Apache-2.0
"""Marks in the messages of a chat, and where they come out in its rendered prompt.

A mark says: what comes up to the end of this text is shared. Where that is in the
rendered prompt, only the template knows. So a copy of the messages, with a probe at the
end of each marked text, is rendered as well: where the probe comes out, the mark is.
Messages that are cut off at the mark would not do: there are templates that raise
without a user's message at the end, or hold a system text back until a user speaks.

Nothing in this module knows about vLLM's objects.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.junctions.metrics.marks import MarkOutcome
from vllm.junctions.rules.declared import MAX_DECLARED

ANTHROPIC_KEY, OPENAI_KEY = "cache_control", "prompt_cache_breakpoint"
# Where a part of a type has its text; tool results are Anthropic's.
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "tool_result": "content",
}
# Parts that are rendered from the messages alone.
_PLAIN_TYPES = _TEXT_KEYS.keys() | {
    *("refusal", "thinking", "redacted_thinking"),
    *("tool_use", "tool_reference"),
}
# No text holds it by chance, nor on purpose.
_NONCE = secrets.token_hex(4)
_AFTER = f"\xa4{_NONCE}.\xa4"
PROBES = tuple(f"\xa4{_NONCE}{number}\xa4" for number in range(MAX_DECLARED))

# Index of the message, and of the part in its content; None: the content is a string.
Place = tuple[int, int | None]


@dataclass(frozen=True)
class Marks:
    """The marks of a chat.

    Attributes:
        places: Of those that can be looked for, in the order of the messages, at most
            four.
        ignored: One outcome for each of the others.
    """

    places: tuple[Place, ...] = ()
    ignored: tuple[MarkOutcome, ...] = ()


def find_marks(messages: Any) -> Marks | None:
    """Return the marks of a chat's messages; None where there is none.

    A mark is ``"cache_control": {"type": "ephemeral"}`` or a true
    ``"prompt_cache_breakpoint"`` on a text part, or on a message whose content is a
    string. Content that is neither a list nor a string is not looked into.

    Args:
        messages: As the client sent them, in OpenAI's form.
    """
    places: list[Place] = []
    ignored: list[MarkOutcome] = []
    for place, marked in _marked(messages):
        if not _is_mark(marked):
            ignored.append(MarkOutcome.MALFORMED)
        elif not isinstance(_text_at(messages, place), str):
            ignored.append(MarkOutcome.NOT_TEXT)
        else:
            places.append(place)
    if not places and not ignored:
        return None
    if places and _has_media(messages):
        ignored += [MarkOutcome.MEDIA] * len(places)
        places = []
    ignored += [MarkOutcome.TOO_MANY] * (len(places) - MAX_DECLARED)
    return Marks(tuple(places[-MAX_DECLARED:]), tuple(ignored))


def with_lists(messages: Any) -> Any:
    """Return messages with lists in the place of contents that are read by iterating.

    The parts of a ``developer`` message arrive that way. What has been read by now may
    be empty: then there are no parts, and no marks.

    Args:
        messages: Of a chat that has been rendered; they are not changed.
    """
    if all(type(_content(message)) in _KNOWN_CONTENTS for message in messages):
        return messages
    return [
        message
        if type(_content(message)) in _KNOWN_CONTENTS
        else message | {"content": list(message["content"])}
        for message in messages
    ]


def with_probes(messages: Sequence[Any], marks: Marks) -> list[Any]:
    """Return messages with a probe at the end of each marked text.

    Every text behind the last mark is changed too, so that what depends on it does not
    look the same. White space at the end of a text stays there: templates trim it.

    Args:
        messages: Of the chat; they are not changed.
        marks: What :func:`find_marks` found in them.
    """
    probed = list(messages)
    for probe, place in zip(PROBES, marks.places, strict=False):
        _insert(probed, messages, place, probe)
    last = _order(marks.places[-1])
    for place in _texts(messages):
        if _order(place) > last:
            _insert(probed, messages, place, _AFTER)
    return probed


def mark_ends(text: str, probed: str, num_marks: int) -> list[int | MarkOutcome]:
    """Return where each marked text ends in a rendered prompt, in characters.

    Worked example: ``text`` is "<u>DOC Q", ``probed`` "<u>DOC(probe) Q": 6.

    Args:
        text: The prompt as it is sent.
        probed: What :func:`with_probes` renders to.
        num_marks: How many marks were probed for.

    Returns:
        For each mark its end, such that ``text[:end]`` is what was rendered before the
        probe; or why there is none.
    """
    ends: list[int | MarkOutcome] = []
    for probe in PROBES[:num_marks]:
        before, found, _ = probed.partition(probe)
        if not found:
            ends.append(MarkOutcome.NOT_RENDERED)
            continue
        for other in PROBES:
            before = before.replace(other, "")
        ends.append(len(before) if text.startswith(before) else MarkOutcome.DIFFERS)
    return ends


_KNOWN_CONTENTS = (str, list, type(None))


def _content(message: Any) -> Any:
    return message.get("content") if isinstance(message, dict) else None


def _marked(messages: Any) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield all messages and parts that bear the name of a mark."""
    for index, message in enumerate(messages):
        content = _content(message)
        if type(content) is list:
            for number, part in enumerate(content):
                if isinstance(part, dict) and _bears_mark(part):
                    yield (index, number), part
        elif type(content) is str and _bears_mark(message):
            yield (index, None), message


def _bears_mark(part: Mapping[str, Any]) -> bool:
    if part.get(ANTHROPIC_KEY) is not None:
        return True
    breakpoint_ = part.get(OPENAI_KEY)
    return bool(breakpoint_) or isinstance(breakpoint_, dict)


def _is_mark(part: Mapping[str, Any]) -> bool:
    control = part.get(ANTHROPIC_KEY)
    if control is None:
        return True
    return isinstance(control, dict) and control.get("type") == "ephemeral"


def _text_at(messages: Any, place: Place) -> Any:
    index, number = place
    content = messages[index]["content"]
    if number is None:
        return content
    part = content[number]
    return part.get(_text_key(part))


def _text_key(part: Mapping[str, Any]) -> str | None:
    kind = part.get("type")
    return _TEXT_KEYS.get(kind) if isinstance(kind, str) else None


def _has_media(messages: Any) -> bool:
    contents = map(_content, messages)
    return any(
        _is_media(part)
        for content in contents
        if type(content) is list
        for part in content
    )


def _is_media(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    kind, content = part.get("type"), part.get("content")
    if kind == "tool_result" and type(content) is list:
        return any(map(_is_media, content))
    return not isinstance(kind, str) or kind not in _PLAIN_TYPES


def _texts(messages: Sequence[Any]) -> Iterator[Place]:
    for index, message in enumerate(messages):
        content = _content(message)
        if type(content) is str:
            yield index, None
        elif type(content) is list:
            for number, part in enumerate(content):
                if isinstance(part, dict):
                    place = index, number
                    if isinstance(_text_at(messages, place), str):
                        yield place


def _order(place: Place) -> tuple[int, int]:
    return place[0], place[1] or 0


def _insert(
    probed: list[Any], messages: Sequence[Any], place: Place, probe: str
) -> None:
    index, number = place
    if probed[index] is messages[index]:
        probed[index] = dict(messages[index])
        if number is not None:
            probed[index]["content"] = list(messages[index]["content"])
    message = probed[index]
    if number is None:
        message["content"] = _with_probe(message["content"], probe)
    else:
        part = message["content"][number]
        key = _text_key(part)
        message["content"][number] = part | {key: _with_probe(part[key], probe)}


def _with_probe(text: str, probe: str) -> str:
    kept = text.rstrip()
    return kept + probe + text[len(kept) :]

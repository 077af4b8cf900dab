# SPDX-License-Identifier: Apache-2.0
import copy

import pytest

from vllm.junctions.declared.marks import PROBES, find_marks, mark_ends, with_probes
from vllm.junctions.metrics.marks import MarkOutcome

_EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def _text(text: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": text, **more}


def _user(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    "mark",
    [
        _EPHEMERAL,
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"prompt_cache_breakpoint": True},
        {"prompt_cache_breakpoint": {"mode": "explicit"}},
        {"prompt_cache_breakpoint": {}},
    ],
)
def test_both_forms_of_a_mark_are_found(mark):
    marks = find_marks([_user(_text("a"), _text("b", **mark)), _user(_text("c"))])
    assert marks is not None
    assert (marks.places, marks.ignored) == (((0, 1),), ())


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "plain"}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [_user(_text("a"), "a string", {"type": "image_url"})],
        [_user(_text("a", cache_control=None, prompt_cache_breakpoint=False))],
        [object()],
    ],
)
def test_what_has_no_mark_is_left_alone(messages):
    assert find_marks(messages) is None


@pytest.mark.parametrize(
    "control", ["ephemeral", {}, {"type": "forever"}, [], 0, False, {"type": ["x"]}]
)
def test_a_malformed_mark_is_ignored(control):
    marks = find_marks([_user(_text("a", cache_control=control))])
    assert marks is not None
    assert (marks.places, marks.ignored) == ((), (MarkOutcome.MALFORMED,))


def test_marks_on_what_is_no_text_and_beside_media_are_ignored():
    image = {"type": "image_url", "image_url": {"url": "u"}, **_EPHEMERAL}
    marks = find_marks([_user(image, _text("a", **_EPHEMERAL))])
    assert marks is not None
    assert marks.places == ()
    assert marks.ignored == (MarkOutcome.NOT_TEXT, MarkOutcome.MEDIA)


@pytest.mark.parametrize("kind", [None, [], {}, 3, "image_url", "nonsense"])
def test_a_part_of_any_type_may_stand_beside_a_mark(kind):
    marks = find_marks([_user({"type": kind}, _text("a", **_EPHEMERAL))])
    assert marks is not None
    assert (marks.places, marks.ignored) == ((), (MarkOutcome.MEDIA,))


def test_a_mark_on_a_message_is_the_end_of_its_string():
    marks = find_marks([{"role": "system", "content": "s", **_EPHEMERAL}])
    assert marks is not None
    assert marks.places == ((0, None),)


def test_of_more_than_four_marks_the_last_four_count():
    marks = find_marks([_user(_text(str(n), **_EPHEMERAL)) for n in range(6)])
    assert marks is not None
    assert marks.places == ((2, 0), (3, 0), (4, 0), (5, 0))
    assert marks.ignored == (MarkOutcome.TOO_MANY,) * 2


def test_probes_stand_before_white_space_and_leave_the_messages_alone():
    messages = [
        {"role": "system", "content": "s \n", **_EPHEMERAL},
        _user(_text("a", **_EPHEMERAL), _text("b\n")),
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c"},
    ]
    before = copy.deepcopy(messages)
    marks = find_marks(messages)
    assert marks is not None
    probed = with_probes(messages, marks)
    assert messages == before
    assert probed[0]["content"] == f"s{PROBES[0]} \n"
    one, two = probed[1]["content"]
    assert one == _text(f"a{PROBES[1]}", **_EPHEMERAL)
    # Behind the last mark all texts differ, so nothing that depends on them agrees.
    assert two["text"] not in ("b\n", f"b{PROBES[1]}\n")
    assert two["text"].startswith("b")
    assert two["text"].endswith("\n")
    assert probed[2] is messages[2]
    assert probed[3]["content"] != "c"


def test_ends_are_where_probes_come_out():
    text = "<u>DOC Q<u>MORE"
    probed = f"<u>DOC{PROBES[0]} Q<u>MORE{PROBES[1]}"
    assert mark_ends(text, probed, 2) == [6, 15]
    assert mark_ends(text, f"<u>DOC{PROBES[0]}!", 2) == [6, MarkOutcome.NOT_RENDERED]
    assert mark_ends(text, f"<u>other{PROBES[0]}", 1) == [MarkOutcome.DIFFERS]

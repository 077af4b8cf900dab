# SPDX-License-Identifier: Apache-2.0
"""From a chat request to what its scheduler gets, with vLLM's own renderer."""

import asyncio
import copy

import pytest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers.params import ChatParams
from vllm.sampling_params import SamplingParams

from testbed import gemma3_270m
from testbed.chat import FORGETFUL, QUESTION_FIRST, THINKING, TURNS, words
from vllm.junctions.declared.positions import num_common_tokens

pytestmark = pytest.mark.usefixtures("marks_on")

_EPHEMERAL = {"type": "ephemeral"}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object"}},
    }
]


def part(text: str, marked: bool = False) -> dict:
    made: dict = {"type": "text", "text": text}
    if marked:
        made["cache_control"] = dict(_EPHEMERAL)
    return made


def chat(document: str, question: str, marked: bool = True) -> list[dict]:
    """A system prompt, then a document with a question behind it in one message."""
    return [
        {"role": "system", "content": [part("Be brief. \n")]},
        {"role": "user", "content": [part(document, marked), part(question)]},
    ]


def unmarked(messages: list[dict]) -> list[dict]:
    plain = copy.deepcopy(messages)
    for message in plain:
        message.pop("cache_control", None)
        if isinstance(message["content"], list):
            for one in message["content"]:
                one.pop("cache_control", None)
    return plain


def shared_tokens(front_end, one: list[dict], other: list[dict], **fields) -> int:
    return num_common_tokens(
        *(
            front_end.rendered(unmarked(messages), **fields)["prompt_token_ids"]
            for messages in (one, other)
        )
    )


def test_a_mark_becomes_the_position_up_to_which_siblings_share(
    make_front_end, outcomes
):
    front_end = make_front_end()
    document = words("doc", 300) + "."
    a, b = chat(document, " Why so?\n"), chat(document, "how many were there")
    (position,) = front_end.positions(a)
    shared = shared_tokens(front_end, a, b)
    assert shared - 1 <= position <= shared
    assert position > 300
    assert outcomes() == {"taken": 1}


_GEMMA = gemma3_270m.CACHE / gemma3_270m.NAME / "tokenizer.json"


@pytest.mark.skipif(not _GEMMA.exists(), reason="Gemma 3 270M was not fetched")
@pytest.mark.parametrize("end", ["", ".", "?\n\n", " ", "—", "日本", "\n```\n", "un"])
@pytest.mark.parametrize("start", ["Why?", "til", " what", "\n\n- one", "語", "..."])
def test_a_trained_tokenizer_shares_up_to_the_mark(make_front_end, end, start):
    """Whatever merges across a mark costs the last tokens before it, and no more."""
    front_end = make_front_end(tokenizer=_GEMMA)
    document = (
        "The quick brown fox doesn't jump over 12,345 dogs\u2019 beds; " * 40 + end
    )
    a, b = chat(document, start + " is it so"), chat(document, "Zebras, perhaps")
    (position,) = front_end.positions(a)
    ids = front_end.rendered(unmarked(a))["prompt_token_ids"]
    text = front_end.rendered(unmarked(a))["prompt"]
    decode = front_end.renderer.tokenizer.decode
    before = decode(ids[:position])
    marked_end = text.index(document.strip()) + len(document.strip())
    assert text.startswith(before)
    assert marked_end - 8 <= len(before) <= marked_end
    assert position <= shared_tokens(front_end, a, b) + 2


def test_the_prompt_is_what_it_is_without_marks(make_front_end):
    front_end = make_front_end()
    messages = chat(words("doc", 40), "Why?")
    with_marks = front_end.rendered(messages)
    plain = front_end.rendered(unmarked(messages))
    for key in ("prompt", "prompt_token_ids", "type"):
        assert with_marks[key] == plain[key]


def renderings(front_end, monkeypatch) -> list:
    """Return a list that each rendering from now on is added to."""
    rendered = []
    original = front_end.renderer.render_messages_async

    async def noted(*args):
        rendered.append(args)
        return await original(*args)

    monkeypatch.setattr(front_end.renderer, "render_messages_async", noted)
    return rendered


def test_a_request_without_marks_is_rendered_once_and_changes_in_nothing(
    make_front_end, monkeypatch, outcomes
):
    front_end = make_front_end()
    rendered = renderings(front_end, monkeypatch)
    messages = chat("Some document.", "Why?", marked=False)
    assert front_end.params(messages) is None
    assert len(rendered) == 1
    assert front_end.params(messages, kv_transfer_params={"x": 1}) == {"x": 1}
    assert outcomes() == {}


def test_several_marks_cost_one_more_rendering(make_front_end, monkeypatch):
    front_end = make_front_end()
    calls = renderings(front_end, monkeypatch)
    system = {"role": "system", "content": [part(words("s", 50), True)]}
    turns = [
        {"role": "user", "content": [part(words("u1", 40), True)]},
        {"role": "assistant", "content": [part(words("a1", 40))]},
        {"role": "user", "content": [part(words("u2", 40), True), part("Why?")]},
    ]
    positions = front_end.positions([system, *turns])
    assert len(calls) == 2
    assert positions == sorted(set(positions))
    assert len(positions) == 3
    other = [
        {"role": "system", "content": words("s", 50)},
        {"role": "user", "content": "Something else."},
    ]
    # Behind the system text, both have white space and may have a first letter.
    shared = shared_tokens(front_end, [system, *turns], other)
    assert shared - 3 <= positions[0] <= shared


def test_a_known_text_is_not_tokenised_again(make_front_end, monkeypatch):
    front_end = make_front_end()
    document = words("known", 200)
    first = front_end.positions(chat(document, "Why?"))
    texts = []
    original = front_end.renderer.tokenize_prompts_async

    async def counted(prompts, params):
        texts.extend(prompt["prompt"] for prompt in prompts)
        return await original(prompts, params)

    monkeypatch.setattr(front_end.renderer, "tokenize_prompts_async", counted)
    assert front_end.positions(chat(document, "How?")) == first
    assert len(texts) == 1  # the prompt itself


def test_a_mark_within_a_token_is_floored_to_the_last_whole_one(make_front_end):
    front_end = make_front_end()
    tokenizer = front_end.renderer.tokenizer
    document = words("cut", 60)
    spans = tokenizer(document, return_offsets_mapping=True)["offset_mapping"]
    # The middle of a long token in the second half.
    start, end = next(one for one in spans[60:] if one[1] - one[0] >= 4)
    messages = chat(document[: start + 2], document[start + 2 :])
    (position,) = front_end.positions(messages)
    prompt = front_end.rendered(messages)
    before, _, _ = prompt["prompt"].partition(document)
    assert tokenizer.decode(prompt["prompt_token_ids"][:position]) == (
        before + document[:start]
    )
    assert end > start + 2


def test_explicit_positions_and_marks_go_together(make_front_end, outcomes):
    front_end = make_front_end()
    messages = chat(words("doc", 100), "Why?")
    (position,) = front_end.positions(messages)
    sent = {"junctions": [32], "other": True}
    params = front_end.params(messages, kv_transfer_params=sent)
    assert params == {"junctions": [32, position], "other": True}
    assert sent == {"junctions": [32], "other": True}
    outcomes()
    sent = {"junctions": "nonsense"}
    assert front_end.params(messages, kv_transfer_params=sent) == sent
    assert outcomes() == {"taken": 1, "positions_unusable": 1}


@pytest.mark.parametrize("tools", [None, _TOOLS])
def test_reasoning_of_earlier_turns_is_where_siblings_have_it(make_front_end, tools):
    """The template renders reasoning behind the last user message only."""
    front_end = make_front_end(THINKING)

    def asked(question: str) -> list[dict]:
        return [
            {"role": "user", "content": [part(words("u", 60), True)]},
            {
                "role": "assistant",
                "content": [part(words("a", 30), True)],
                "reasoning": words("because", 50),
            },
            {"role": "user", "content": question},
        ]

    fields = {"tools": tools, "tool_choice": "none"} if tools else {}
    a, b = asked("Why?"), asked("how many")
    first, second = front_end.positions(a, **fields)
    shared = shared_tokens(front_end, a, b, **fields)
    assert first < second <= shared
    # What follows the mark is the same up to the question.
    decode = front_end.renderer.tokenizer.decode
    between = front_end.rendered(a, **fields)["prompt_token_ids"][second:shared]
    assert decode(between) in ("<end>\n<turn>user\n", ".<end>\n<turn>user\n")
    assert "because" not in front_end.rendered(a, **fields)["prompt"]


def test_a_message_that_the_template_drops_has_no_position(make_front_end, outcomes):
    front_end = make_front_end(FORGETFUL)
    messages = [
        {"role": "user", "content": [part("dropped", True)]},
        {"role": "assistant", "content": "kept"},
        {"role": "user", "content": "Why?"},
    ]
    assert front_end.params(messages) is None
    assert outcomes() == {"not_rendered": 1}


def test_text_that_depends_on_what_follows_the_mark_has_no_position(
    make_front_end, outcomes
):
    front_end = make_front_end(QUESTION_FIRST)
    messages = [
        {"role": "user", "content": [part("a document", True)]},
        {"role": "user", "content": "Why?"},
    ]
    assert front_end.params(messages) is None
    assert outcomes() == {"differs": 1}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"cache_control": "yes"}, "malformed"),
        ({"cache_control": {"type": "forever"}}, "malformed"),
        ({"type": "refusal", "refusal": "no"}, "not_text"),
    ],
)
def test_what_is_no_mark_is_served_as_without(
    make_front_end, outcomes, change, outcome
):
    front_end = make_front_end()
    messages = chat("A document.", "Why?")
    messages[1]["content"][0] |= change
    plain = front_end.rendered(unmarked(messages))
    assert front_end.rendered(messages)["prompt"] == plain["prompt"]
    outcomes()
    assert front_end.params(messages) is None
    assert outcomes() == {outcome: 1}


def test_a_prompt_that_is_to_be_truncated_has_no_position(make_front_end, outcomes):
    messages = chat(words("doc", 100), "Why?")
    front_end = make_front_end()
    assert front_end.params(messages, truncate_prompt_tokens=50) is None
    assert outcomes() == {"truncated": 1}


def test_a_template_that_fails_on_probes_costs_the_position_only(
    make_front_end, outcomes
):
    picky = TURNS.replace(
        "{%- for m in messages -%}",
        "{%- for m in messages -%}{%- if '\xa4' in m.content | string -%}"
        "{{ raise_exception('no such sign') }}{%- endif -%}",
        1,
    )
    front_end = make_front_end(picky)
    assert front_end.params(chat("A document.", "Why?")) is None
    assert outcomes() == {"failed": 1}


@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        (None, None),
        ("ExampleConnector", None),
        ("MooncakeStoreConnector", {"junctions": False}),
    ],
)
def test_other_engines_of_the_process_read_no_marks(
    make_front_end, outcomes, connector, extra
):
    front_end = make_front_end(connector=connector, extra=extra)
    assert front_end.params(chat("A document.", "Why?")) is None
    assert outcomes() == {}


def test_marks_are_read_under_a_multi_connector(make_front_end):
    children = [
        {"kv_connector": name, "kv_role": "kv_both"}
        for name in ("ExampleConnector", "MooncakeStoreConnector")
    ]
    front_end = make_front_end(
        connector="MultiConnector", extra={"connectors": children}
    )
    assert len(front_end.positions(chat(words("doc", 40), "Why?"))) == 1


def test_a_developer_message_can_be_marked(make_front_end):
    front_end = make_front_end(THINKING)
    messages = [
        {"role": "developer", "content": [part(words("dev", 60), True)]},
        {"role": "user", "content": "Why?"},
    ]
    (position,) = front_end.positions(messages)
    prompt = front_end.rendered(messages)
    rest = front_end.renderer.tokenizer.decode(prompt["prompt_token_ids"][position:])
    assert rest.startswith(("<end>", ".<end>"))
    assert front_end.positions(messages) == [position]


def test_the_responses_api_has_marks_too(make_front_end):
    front_end = make_front_end()
    document = words("doc", 100)
    request = ResponsesRequest(
        model="m",
        instructions="Be brief.",
        input=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": document,
                        "prompt_cache_breakpoint": {"mode": "explicit"},
                    },
                    {"type": "input_text", "text": "Why?"},
                ],
            }
        ],
    )
    prompt = asyncio.run(front_end.online.render_responses(request)).engine_input
    made = front_end.inputs.process_inputs(
        "r", prompt, request.to_sampling_params(8, {}), ("generate",)
    )
    (position,) = made.sampling_params.extra_args["kv_transfer_params"]["junctions"]
    decode = front_end.renderer.tokenizer.decode
    assert decode(made.prompt_token_ids[:position]).endswith(document[-8:])


def test_offline_chats_have_marks_too_and_keep_their_parameters(make_front_end):
    front_end = make_front_end()
    messages = chat(words("doc", 100), "Why?")
    options = ChatParams(
        chat_template_kwargs={"add_generation_prompt": True, "tokenize": False}
    )
    tok_params = front_end.renderer.default_chat_tok_params
    _, prompts = front_end.renderer.render_chat(
        [messages, unmarked(messages)], options, tok_params
    )
    params = SamplingParams(max_tokens=8)
    found = []
    for prompt in prompts:
        made = front_end.inputs.process_inputs("r", prompt, params, ("generate",))
        found.append(made.sampling_params.extra_args)
    expected = front_end.positions(messages)
    assert found == [{"kv_transfer_params": {"junctions": expected}}, None]
    assert params.extra_args is None

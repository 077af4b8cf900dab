# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from benchmarks.replay.trace import TraceError, number_prompts, read_trace
from tests.unit.benchmarks.replay.layouts import request

LINE = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_requests_come_in_order_of_arrival(tmp_path):
    later = json.dumps(LINE | {"timestamp": 9.5})
    earlier = json.dumps(LINE | {"timestamp": 0, "type": "text"})
    trace = read_trace(write(tmp_path, later, "", earlier))
    assert [request.timestamp for request in trace] == [0, 9.5]
    assert trace[0].hash_ids == [1, 2]


def test_only_the_first_requests_are_read_where_asked_for(tmp_path):
    lines = [json.dumps(LINE | {"timestamp": time}) for time in range(3)]
    trace = read_trace(write(tmp_path, *lines, "never read"), 2)
    assert [request.timestamp for request in trace] == [0, 1]


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"Cannot read .*none.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_trace_is_an_error(tmp_path, text):
    with pytest.raises(TraceError, match="holds no requests"):
        read_trace(write(tmp_path, text))


def test_a_cut_line_is_named(tmp_path):
    whole = json.dumps(LINE)
    path = write(tmp_path, whole, whole[:-10])
    with pytest.raises(TraceError, match=r"Line 2 of .* is no complete JSON object"):
        read_trace(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": None}, r"Line 1 .* is no request: .*hash_ids"),
        ({"hash_ids": ["a", "b"]}, r"Expected `int`, got `str`"),
        ({"input_length": 0}, r"Expected `int` >= 1"),
        ({"input_length": "700"}, r"input_length"),
        ({"input_length": 1025}, r"2 hash_ids, but 1025 tokens are 3 blocks of 512"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, change, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, json.dumps(LINE | change)))


def test_a_missing_field_is_named(tmp_path):
    line = {name: value for name, value in LINE.items() if name != "hash_ids"}
    with pytest.raises(TraceError, match="missing required field `hash_ids`"):
        read_trace(write(tmp_path, json.dumps(line)))


def units(trace, hash_tokens=128, **options):
    prompts = number_prompts(trace, hash_tokens, **options).prompts
    return [prompt.units.tolist() for prompt in prompts]


def test_equal_blocks_have_equal_units_and_others_none_in_common():
    first, second = units([request(1024, 7, 8), request(1300, 7, 9, 10)])
    assert len(first) == 8
    assert len(second) == 1300 // 128
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second[4:])


def test_a_block_is_another_one_behind_another_prefix():
    first, second = units([request(1024, 1, 5), request(1024, 2, 5)])
    assert not set(first) & set(second)


def test_a_block_that_is_not_whole_has_whole_units_only():
    (only,) = units([request(512 + 300, 1, 2)])
    assert only == [0, 1, 2, 3, 4, 5]


def test_conversations_go_by_their_first_block():
    trace = [request(1024, 1, 2), request(600, 3, 4), request(1024, 1, 5)]
    first, second, third = number_prompts(trace, 64).prompts
    assert first.conversation == third.conversation != second.conversation


def test_a_prompt_that_goes_on_can_be_taken_to_share_the_last_block():
    trace = [request(512 + 300, 1, 2), request(1536, 1, 3, 4), request(1024, 1, 3)]
    assert units(trace)[0][4:] != units(trace)[1][4:6]
    first, second, third = units(trace, assume_continued=True)
    assert first == second[:6] == third[:6]
    assert second[6] not in first
    assert third[6:] == second[6:8]


def test_a_shorter_prompt_and_one_with_no_whole_block_in_common_go_on_nowhere():
    trace = [request(512 + 300, 1, 2), request(512 + 200, 1, 3), request(600, 4, 5)]
    first, second, third = units(trace, assume_continued=True)
    assert second[4:] != first[4:5]
    assert not set(third) & set(first)

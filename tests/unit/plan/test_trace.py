# SPDX-License-Identifier: Apache-2.0
import gzip
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from vllm.junctions.plan.layouts import LAYOUTS
from vllm.junctions.plan.prompts import ContinuedUnits, Units
from vllm.junctions.plan.trace import Trace, TraceError
from vllm.junctions.record.format import Header

LINE = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}


def write(tmp_path, *lines, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(lines))
    return path


def read(*paths, **options):
    trace = Trace(paths, **options)
    return list(trace.prompts(Units(trace.block_tokens, 4)))


def header(**changes) -> str:
    made = {
        "junctions_recording": 1,
        "block_tokens": 512,
        "start_ms": 1000,
        "id_space": "a",
        "layout": LAYOUTS["gemma3-12b"],
    }
    return msgspec.json.encode(Header(**made | changes)).decode()


def test_requests_come_in_order_of_arrival(tmp_path):
    later = json.dumps(LINE | {"timestamp": 9.5, "input_length": 513})
    earlier = json.dumps(LINE | {"timestamp": 0, "type": "text"})
    assert [p.num_tokens for p in read(write(tmp_path, later, "", earlier))] == [
        *(700, 513)
    ]


def test_only_the_first_requests_are_read_where_asked_for(tmp_path):
    lines = [json.dumps(LINE | {"timestamp": time}) for time in range(3)]
    assert len(read(write(tmp_path, *lines, "never read"), num_requests=2)) == 2


def test_files_are_merged_by_time_and_each_is_an_instance(tmp_path):
    one, two = (
        write(
            tmp_path,
            header(start_ms=start),
            *(json.dumps(LINE | {"timestamp": time}) for time in times),
            "",
            name=name,
        )
        for name, start, times in (("a", 1000, (0, 50)), ("b", 1020, (0, 40)))
    )
    assert [p.instance for p in read(one, two)] == [0, 1, 0, 1]


def test_two_generations_of_a_recording_are_one_instance(tmp_path):
    older, newer, other = (
        write(
            tmp_path,
            header(engine=engine),
            json.dumps(LINE | {"timestamp": time}),
            "",
            name=name,
        )
        for name, engine, time in (("a.1", "", 0), ("a", "", 9), ("b", "dp1", 5))
    )
    assert Trace([older, newer]).num_instances == 1
    assert [p.instance for p in read(older, newer, other)] == [0, 1, 0]


def test_a_recording_that_is_being_written_ends_with_its_last_whole_line(tmp_path):
    lines = (header(), json.dumps(LINE), json.dumps(LINE)[:-9])
    assert len(read(write(tmp_path, *lines))) == 1


@pytest.mark.parametrize("block", [16, 64, 512, 1024])
def test_blocks_of_any_length_can_be_read(tmp_path, block):
    ids = list(range(-(-5000 // block)))
    line = LINE | {"input_length": 5000, "hash_ids": ids}
    trace = Trace([write(tmp_path, json.dumps(line))], block_tokens=block)
    (prompt,) = trace.prompts(Units(block, 64))
    assert len(prompt.ids) == 5000 // 64


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"Cannot read .*none.jsonl: No such file"):
        Trace([tmp_path / "none.jsonl"])


def test_a_trace_given_twice_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path, json.dumps(LINE))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=r"trace.jsonl is given twice"):
        Trace([path, Path(path.name)])


def test_a_compressed_trace_is_to_be_unpacked(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(LINE).encode()))
    with pytest.raises(TraceError, match="is compressed: unpack it first"):
        Trace([path])


def test_an_engine_that_served_nothing_is_no_instance(tmp_path):
    idle = write(tmp_path, header(engine="dp1"), "", name="idle")
    busy = write(tmp_path, header(), json.dumps(LINE), "", name="busy")
    trace = Trace([idle, busy])
    assert (trace.num_instances, len(trace.headers), trace.name) == (1, 1, "busy")


def test_the_block_size_of_a_recording_is_its_own(tmp_path):
    path = write(tmp_path, header(block_tokens=512), json.dumps(LINE), "")
    assert Trace([path], block_tokens=512).block_tokens == 512
    with pytest.raises(TraceError, match="blocks are of 512 tokens: leave out"):
        Trace([path], block_tokens=64)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_trace_is_an_error(tmp_path, text):
    with pytest.raises(TraceError, match="holds no requests"):
        Trace([write(tmp_path, text)])


def test_a_cut_line_is_named(tmp_path):
    whole = json.dumps(LINE)
    with pytest.raises(TraceError, match=r"Line 2 of .* is no complete JSON object"):
        Trace([write(tmp_path, whole, whole[:-10])])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": None}, r"Line 1 .* is no request: .*hash_ids"),
        ({"hash_ids": ["a", "b"]}, r"Expected `int`, got `str`"),
        ({"input_length": 0}, r"Expected `int` >= 1"),
        ({"input_length": "700"}, r"input_length"),
        (
            {"input_length": 1025},
            r"2 hash_ids, but 1025 tokens are 3 blocks of 512.*--block-tokens",
        ),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, change, message):
    with pytest.raises(TraceError, match=message):
        Trace([write(tmp_path, json.dumps(LINE | change))])


def test_recordings_that_do_not_fit_each_other_are_refused(tmp_path):
    line = json.dumps(LINE)
    one = write(tmp_path, header(), line, "", name="a")
    other = write(tmp_path, header(block_tokens=64), line, "", name="b")
    with pytest.raises(TraceError, match="different lengths"):
        Trace([one, other])
    newer = write(tmp_path, header(junctions_recording=9), line, "", name="c")
    with pytest.raises(TraceError, match="newer than this one"):
        Trace([newer])


def units(*requests, block=512, unit=128, make=Units) -> list[list[int]]:
    maker = make(block, unit)
    return [maker.of(ids, length).tolist() for length, *ids in requests]


def test_equal_blocks_have_equal_units_and_others_none_in_common():
    first, second = units((1024, 7, 8), (1300, 7, 9, 10))
    assert len(first) == 8
    assert len(second) == 1300 // 128
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second[4:])


def test_a_block_is_another_one_behind_another_prefix():
    first, second = units((1024, 1, 5), (1024, 2, 5))
    assert not set(first) & set(second)


def test_a_rest_is_the_same_only_where_it_is_as_long():
    first, other, again = units((812, 1, 2), (800, 1, 2), (812, 1, 2))
    assert first == again
    assert first[:4] == other[:4]
    assert not set(first[4:]) & set(other[4:])


def test_short_blocks_make_one_unit():
    first, second = units((64, 1, 2, 3, 4), (64, 1, 2, 3, 5), block=16, unit=32)
    assert len(first) == 2
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_units_need_not_divide_blocks():
    first, second = units((400, 1, 2, 3, 4), (400, 1, 2, 3, 5), block=100, unit=64)
    assert len(first) == 6
    assert first[:4] == second[:4]
    assert first[4:] != second[4:]


def test_ids_may_be_of_any_size():
    found = units((1024, -1, 2), (1024, 1 << 80, 2), (1024, 0, 2))
    assert len({tuple(one) for one in found}) == 3


def test_a_prompt_that_goes_on_can_be_taken_to_share_the_last_block():
    trace = ((812, 1, 2), (1536, 1, 3, 4), (1024, 1, 3))
    first, second, third = units(*trace, make=ContinuedUnits)
    assert first == second[:6] == third[:6]
    assert second[6] not in first
    assert third[6:] == second[6:8]


def test_a_shorter_prompt_and_one_with_no_whole_block_in_common_go_on_nowhere():
    trace = ((812, 1, 2), (712, 1, 3), (600, 4, 5))
    first, second, third = units(*trace, make=ContinuedUnits)
    assert second[4:] != first[4:5]
    assert not set(third) & set(first)


def test_units_are_numbers_of_64_bits():
    assert Units(512, 64).of([1], 512).dtype == np.uint64

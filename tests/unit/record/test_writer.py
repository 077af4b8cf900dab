# SPDX-License-Identifier: Apache-2.0
import logging
import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from vllm.junctions.plan.layouts import LAYOUTS
from vllm.junctions.record import writer as writer_module
from vllm.junctions.record.format import Header, RecordedRequest
from vllm.junctions.record.writer import Finished, IdMaker, RecordingWriter

HEADER = Header(
    junctions_recording=1,
    block_tokens=64,
    start_ms=0,
    id_space="a",
    layout=LAYOUTS["deepseek-v4-flash"],
)


def finished(number: int = 0, num_blocks: int = 3) -> Finished:
    line = RecordedRequest(number, 64 * num_blocks, 1, [])
    return Finished(line, [os.urandom(32) for _ in range(num_blocks)], 0)


@pytest.fixture
def make(tmp_path):
    made = []

    def make_writer(path=tmp_path / "traffic.jsonl", **options) -> RecordingWriter:
        options.setdefault("pause_seconds", 0.01)
        made.append(RecordingWriter(path, HEADER, IdMaker(), **options))
        return made[-1]

    yield make_writer
    for one in made:
        one.close()


def lines(path) -> list[bytes]:
    return path.read_bytes().splitlines()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_writes_what_waits_and_ends_the_thread(make):
    writer = make(pause_seconds=60)
    for number in range(5):
        writer.add(finished(number))
    writer.close()
    first, *rest = lines(writer.path)
    assert msgspec.json.decode(first, type=Header) == HEADER
    decoded = [msgspec.json.decode(line, type=RecordedRequest) for line in rest]
    assert [one.timestamp for one in decoded] == list(range(5))
    assert not writer._thread.is_alive()


def test_ids_say_nothing_without_the_key_and_are_the_same_with_it():
    hashes = [b"a" * 32, b"b" * 32]
    one, other = IdMaker(), IdMaker()
    assert one.ids(hashes) == one.ids(hashes)
    assert not set(one.ids(hashes)) & set(other.ids(hashes))
    assert IdMaker("secret").ids(hashes) == IdMaker("secret").ids(hashes)
    assert max(one.ids(hashes)) < 1 << 48
    # A rest is told apart by its length as well.
    assert one.ids(hashes, 5)[0] == one.ids(hashes)[0]
    assert len({one.ids(hashes, rest)[1] for rest in (0, 5, 6)}) == 3
    assert IdMaker("secret").space(b"1") != IdMaker("secret").space(b"2")


def test_a_full_file_starts_anew_and_one_older_stays(make, tmp_path):
    writer = make(max_bytes=4000)
    for number in range(300):
        writer.add(finished(number))
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("traffic.jsonl", "traffic.jsonl.1")
    ]
    for path in tmp_path.iterdir():
        assert path.stat().st_size <= 4000
        assert msgspec.json.decode(lines(path)[0], type=Header) == HEADER
    older, newer = (
        lines(tmp_path / name) for name in ("traffic.jsonl.1", "traffic.jsonl")
    )
    numbers = [
        msgspec.json.decode(line)["timestamp"] for line in (*older[1:], *newer[1:])
    ]
    assert numbers == list(range(numbers[0], 300))


def test_a_recording_that_is_there_is_kept_as_the_older_one(make, tmp_path):
    (tmp_path / "traffic.jsonl").write_text("before\n")
    make()
    assert (tmp_path / "traffic.jsonl.1").read_text() == "before\n"


def test_one_without_requests_pushes_none_out_that_has_some(make, tmp_path):
    with_requests = make()
    with_requests.add(finished())
    with_requests.close()
    for _ in range(2):
        make().close()
    assert len(lines(tmp_path / "traffic.jsonl")) == 1
    assert len(lines(tmp_path / "traffic.jsonl.1")) == 2


def test_another_process_that_writes_the_file_is_left_alone(make, tmp_path):
    path = tmp_path / "traffic.jsonl"
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2)"
    hold += "; print('held', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout.readline() == b"held\n"
        writer = make()
    finally:
        other.communicate(b"\n")
    assert writer.path.name == f"traffic.{os.getpid()}.jsonl"
    assert path.read_bytes() == b""


def test_a_file_that_cannot_be_opened_costs_the_recording_only(make, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, writer_module.logger.name):
        writer = make(tmp_path / "none" / "traffic.jsonl")
        writer.add(finished())
    assert writer.is_over
    assert len(caplog.records) == 1
    assert "No such file or directory. The server goes on" in caplog.text
    assert "see that junctions_record names a file in a folder" in caplog.text


def test_a_full_disk_costs_the_recording_and_one_warning(make, monkeypatch, caplog):
    writer = make()

    def full(_lines: bytes) -> None:
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING, writer_module.logger.name):
        monkeypatch.setattr(writer, "_write", full)
        for number in range(3):
            writer.add(finished(number))
            time.sleep(0.03)
        wait_until(lambda: not writer._thread.is_alive())
        writer.add(finished())
    assert writer.is_over
    assert [
        record.getMessage().count("No space left") for record in caplog.records
    ] == [1]


def test_a_folder_that_vanishes_costs_the_recording(make, tmp_path):
    (tmp_path / "sub").mkdir()
    writer = make(tmp_path / "sub" / "traffic.jsonl")
    writer.path.unlink()
    writer.path.parent.rmdir()
    writer.add(finished())
    wait_until(lambda: writer.is_over)


def test_what_comes_too_fast_is_left_out_and_never_waits(make, monkeypatch):
    writer = make(pause_seconds=60)
    monkeypatch.setattr(writer_module, "_MAX_WAITING", 10)
    for number in range(15):
        writer.add(finished(number))
    assert writer.num_left_out == 5
    writer.close()
    assert writer.num_written == 10


def test_nothing_is_left_of_a_closed_one(make):
    before = set(threading.enumerate())
    make().close()
    assert set(threading.enumerate()) <= before

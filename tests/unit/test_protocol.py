# SPDX-License-Identifier: Apache-2.0
"""Wire format: ours, stock's, and each read by the other."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    TailKeyBoundary,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol import (
    decode_lookup_response,
    encode_lookup_response,
)

from vllm.junctions.protocol import (
    JUNCTION_GROUP_ID,
    add_junctions,
    check_lookup_result,
    take_junctions,
)

_TAILS = (TailKeyBoundary(0, 3584), TailKeyBoundary(3, 3584))


def test_the_bytes_of_a_junction_entry():
    result = add_junctions(MooncakeLookupResult(256), (3840,))
    assert encode_lookup_response(result) == bytes.fromhex("00000100ffffffff00000f00")


@pytest.mark.parametrize("hit", [0, 3584])
@pytest.mark.parametrize("junctions", [(), (3840,), (3584, 3840)])
@pytest.mark.parametrize("tails", [(), _TAILS])
def test_round_trip(hit, junctions, tails):
    sent = add_junctions(MooncakeLookupResult(hit, tails), junctions)
    received = take_junctions(
        decode_lookup_response(encode_lookup_response(sent)), num_tokens=4000
    )
    assert received.hit_length == hit
    assert received.tail_key_boundaries == tails
    assert received.junctions == junctions
    assert received.num_dropped == 0


def test_a_payload_without_junctions_is_the_stock_payload():
    stock = MooncakeLookupResult(3584, _TAILS)
    assert encode_lookup_response(add_junctions(stock, ())) == encode_lookup_response(
        stock
    )


def test_a_stock_payload_reads_as_before():
    payload = encode_lookup_response(MooncakeLookupResult(3584, _TAILS))
    received = take_junctions(decode_lookup_response(payload), 4000)
    assert (received.hit_length, received.tail_key_boundaries) == (3584, _TAILS)
    assert received.junctions == ()


def test_a_bare_hit_length_reads_as_before():
    received = take_junctions(decode_lookup_response(bytes(4)), 4000)
    assert (received.hit_length, received.junctions) == (0, ())


def test_the_stock_loader_finds_no_group_with_the_sentinel_id():
    sent = add_junctions(MooncakeLookupResult(3584, _TAILS), (3840,))
    read_by_stock = decode_lookup_response(encode_lookup_response(sent))
    by_group = {b.group_id: b.num_tokens for b in read_by_stock.tail_key_boundaries}
    assert by_group.pop(JUNCTION_GROUP_ID) == 3840
    assert by_group == {0: 3584, 3: 3584}


def test_junctions_outside_the_request_are_dropped_and_counted():
    sent = add_junctions(MooncakeLookupResult(0), (0, 3840, 2**32 - 1))
    received = take_junctions(sent, num_tokens=4000)
    assert (received.junctions, received.num_dropped) == ((3840,), 2)


@pytest.mark.parametrize("hit", [4000, 4096, 2**32 - 4])
def test_a_hit_that_leaves_nothing_to_compute_is_refused(hit):
    with pytest.raises(ValueError, match=f"hit of {hit} tokens"):
        check_lookup_result(MooncakeLookupResult(hit), 4000, 4)


def test_a_hit_between_two_hashes_is_refused():
    with pytest.raises(ValueError, match="hit of 130 tokens"):
        check_lookup_result(MooncakeLookupResult(130), 4000, 4)


@pytest.mark.parametrize("tokens", [0, 2, 258, 4004])
def test_a_tail_entry_that_names_no_hash_of_the_request_is_refused(tokens):
    result = MooncakeLookupResult(256, (TailKeyBoundary(1, tokens),))
    with pytest.raises(ValueError, match=f"group 1 at {tokens} tokens"):
        check_lookup_result(result, 4000, 4)


def test_a_good_answer_passes():
    check_lookup_result(MooncakeLookupResult(3584, _TAILS), 4000, 4)

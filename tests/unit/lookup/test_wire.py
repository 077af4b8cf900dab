# SPDX-License-Identifier: Apache-2.0
"""Wire format: ours, stock's, and each read by the other."""

from contextlib import nullcontext

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    TailKeyBoundary,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol import (
    decode_lookup_response,
    encode_lookup_response,
)

from vllm.junctions.lookup.wire import (
    JUNCTION_GROUP_ID,
    HitUnits,
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


_WHOLE_BLOCKS = HitUnits(hash_block_size=4, hit=256, block_size=256)
_PARTIAL = HitUnits(hash_block_size=4, hit=4, block_size=256)
both_units = pytest.mark.parametrize("units", [_WHOLE_BLOCKS, _PARTIAL])


@both_units
@pytest.mark.parametrize("hit", [4096, 2**32 - 256])
def test_a_hit_that_leaves_nothing_to_compute_is_refused(hit, units):
    with pytest.raises(ValueError, match=f"hit of {hit} tokens"):
        check_lookup_result(MooncakeLookupResult(hit), 4096, units)


@pytest.mark.parametrize(("hit", "units"), [(130, _PARTIAL), (260, _WHOLE_BLOCKS)])
def test_a_hit_between_two_units_is_refused(hit, units):
    with pytest.raises(ValueError, match=f"hit of {hit} tokens"):
        check_lookup_result(MooncakeLookupResult(hit), 4000, units)


@both_units
@pytest.mark.parametrize("tokens", [0, 2, 252, 258, 260, 4004])
def test_a_tail_entry_that_names_no_block_of_the_hit_is_refused(tokens, units):
    result = MooncakeLookupResult(256, (TailKeyBoundary(1, tokens),))
    with pytest.raises(ValueError, match=f"group 1 at {tokens} tokens"):
        check_lookup_result(result, 4000, units)


@pytest.mark.parametrize(("tokens", "is_good"), [(260, False), (264, True)])
def test_a_tail_above_a_partial_hit_lies_in_its_block(tokens, is_good):
    result = MooncakeLookupResult(264, (TailKeyBoundary(1, tokens),))
    with nullcontext() if is_good else pytest.raises(ValueError, match="group 1"):
        check_lookup_result(result, 4000, _PARTIAL)


def test_no_tail_lies_past_the_request():
    result = MooncakeLookupResult(264, (TailKeyBoundary(1, 304),))
    with pytest.raises(ValueError, match="group 1 at 304 tokens"):
        check_lookup_result(result, 300, _PARTIAL)


@both_units
def test_a_good_answer_passes(units):
    check_lookup_result(MooncakeLookupResult(3584, _TAILS), 4000, units)

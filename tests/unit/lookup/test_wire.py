# SPDX-License-Identifier: Apache-2.0
"""Wire format, as documented; what is taken from it, ``tests/fuzz`` asks."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    TailKeyBoundary,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol import (
    encode_lookup_response,
)

from vllm.junctions.lookup.wire import HitUnits, add_junctions, check_lookup_result


def test_the_bytes_of_a_junction_entry():
    stock = MooncakeLookupResult(256, (TailKeyBoundary(1, 256),))
    assert encode_lookup_response(add_junctions(stock, (3840,))) == bytes.fromhex(
        "00000100 00000001 00000100 ffffffff 00000f00"
    )


@pytest.mark.parametrize("tokens", [262, 304])
def test_a_tail_above_a_hit_within_a_block_is_a_whole_hash_of_the_request(tokens):
    """Too rare for the fuzzer to meet each time."""
    result = MooncakeLookupResult(260, (TailKeyBoundary(1, tokens),))
    units = HitUnits(hash_block_size=4, hit=4, block_size=256)
    with pytest.raises(ValueError, match=f"group 1 at {tokens} tokens"):
        check_lookup_result(result, 300, units)

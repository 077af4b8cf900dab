# SPDX-License-Identifier: Apache-2.0
"""Two-phase lookups find what stock finds, in a bounded number of calls."""

from hypothesis import event, example, given
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    MooncakeStoreWorker,
)

from tests.property.lookups import LookupCase, lookup_cases, random_case
from vllm.junctions.store.worker import JunctionStoreWorker


# A whole prompt of two tokens that hits within its only block.
@example(random_case(287, 5))
@given(lookup_cases())
def test_a_lookup_finds_what_stock_finds(case: LookupCase) -> None:
    store = case.store(
        case.layout.worker(MooncakeStoreWorker, None)._lookup_key_prefixes
    )
    stock = case.layout.worker(MooncakeStoreWorker, store)
    at_once = case.layout.worker(JunctionStoreWorker, store)
    ours = case.layout.worker(JunctionStoreWorker, store)
    ours._lookup_plan = case.layout.plan(ours, case.batches)
    reports = []
    at_once.observe_lookup = ours.observe_lookup = reports.append

    expected = stock.lookup(case.num_tokens, case.block_hashes)
    one_phase = at_once.lookup(case.num_tokens, case.block_hashes)
    stock_keys = store.num_keys // 2
    store.num_keys = store.num_rpcs = 0
    found = ours.lookup(case.num_tokens, case.block_hashes)

    assert found == one_phase
    assert found.hit_length == expected.hit_length
    assert found.tail_key_boundaries == expected.tail_key_boundaries
    first, second = reports
    assert (first.error, second.error) == (None, None)
    assert second.longest_hit_length == first.longest_hit_length
    assert second.outcome == first.outcome
    assert (second.num_keys, second.num_rpcs) == (store.num_keys, store.num_rpcs)
    assert store.num_rpcs <= ours._lookup_plan.max_rpcs(case.num_tokens)
    assert store.num_keys <= stock_keys
    event(f"calls: {store.num_rpcs}")
    event(f"outcome: {second.outcome.value}, junctions: {len(second.junctions)}")

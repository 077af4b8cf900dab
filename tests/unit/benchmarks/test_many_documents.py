# SPDX-License-Identifier: Apache-2.0
"""The documents benchmark's traffic and arithmetic."""

from benchmarks.many_documents import Sample, put_bytes, summarise, traffic

_METRICS = """
# TYPE vllm:mooncake_store_operation_bytes_total counter
vllm:mooncake_store_operation_bytes_total{engine="0",operation="save_put"} 5.0
vllm:mooncake_store_operation_bytes_total{engine="1",operation="save_put"} 7.0
vllm:mooncake_store_operation_bytes_total{engine="0",operation="load_get"} 100.0
"""


def test_each_document_has_two_questions_that_share_it_and_nothing_else():
    requests = traffic(seed=0, documents=4)
    order = [(request.document, request.number) for request in requests]
    assert order == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (3, 0), (2, 1), (3, 1)]
    for document in range(4):
        first, second = (r for r in requests if r.document == document)
        shared = first.document_tokens
        assert 4000 <= shared <= 8000
        assert first.prompt[:shared] == second.prompt[:shared]
        assert first.prompt[shared] != second.prompt[shared]
    assert traffic(0, 4) == requests


def _sample(arm: str, document: int, number: int, hit: int, seconds: float) -> Sample:
    return Sample(arm, document, number, 5000, 5200, hit, seconds)


def test_second_questions_count_and_stock_is_compared_pair_by_pair():
    samples = [
        _sample("stock", 0, 0, 0, 9.0),
        _sample("stock", 1, 1, 0, 8.0),
        _sample("stock", 0, 1, 0, 2.0),
        _sample("declared", 0, 0, 640, 9.0),
        _sample("declared", 0, 1, 5000, 1.0),
        _sample("declared", 1, 1, 0, 2.0),
    ]
    results = summarise(samples, {"stock": 100, "declared": 110})
    ours = results["declared"]
    assert (ours.hit_tokens, ours.hit_share, ours.num_hits) == (5000, 0.5, 1)
    assert ours.speedup == 3.0  # of 2 and 4
    assert (results["stock"].hit_tokens, results["stock"].speedup) == (0, 1.0)
    assert ours.put_bytes == 110


def test_bytes_put_are_added_up_over_engines():
    assert put_bytes(_METRICS) == 12
    assert put_bytes("") == 0

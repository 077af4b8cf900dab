# SPDX-License-Identifier: Apache-2.0
import pickle
from dataclasses import fields

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta

from tests.support import hashes
from vllm.junctions.store.data import JunctionReqMeta, JunctionTracker


def _req_meta() -> ReqMeta:
    return ReqMeta(
        req_id="r",
        token_len_chunk=512,
        block_ids=([1, 2], [0, 3]),
        block_hashes=hashes(4),
        can_save=True,
        num_prompt_tokens=600,
        prefill_end_tokens=600,
        store_job_id=7,
    )


def test_a_job_keeps_every_stock_field_and_gains_junctions():
    stock = _req_meta()
    job = JunctionReqMeta.of(stock, (256, 512))
    for field in fields(ReqMeta):
        assert getattr(job, field.name) is getattr(stock, field.name), field.name
    assert job.shared_prefix_boundaries == (256, 512)


def test_a_job_survives_the_way_to_a_worker():
    job = JunctionReqMeta.of(_req_meta(), (256,))
    assert pickle.loads(pickle.dumps(job)) == job


def test_the_tracker_unites_what_a_request_had_over_its_life():
    tracker = JunctionTracker()
    tracker.add("r", (3584, 3840))
    tracker.add("r", ())
    tracker.add("r", (4096,))
    assert tracker.get("r") == (3584, 3840, 4096)
    assert tracker.get("other") == ()


def test_the_tracker_forgets_ended_requests_only():
    tracker = JunctionTracker()
    tracker.add("r", (256,))
    tracker.add("s", (512,))
    tracker.discard({"r", "unknown"})
    assert tracker.get("r") == ()
    assert tracker.get("s") == (512,)
    assert len(tracker) == 1


def test_requests_without_junctions_take_no_room():
    tracker = JunctionTracker()
    tracker.add("r", ())
    assert len(tracker) == 0

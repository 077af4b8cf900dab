# SPDX-License-Identifier: Apache-2.0
"""Commit 3: the offloading connector reads all boundaries; the scalar goes."""

from tools.series.edits import Commit, Edit

_OFFLOADING = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"

COMMIT = Commit(
    name="offloading",
    message="""\
[KVConnector] Offloading: store tails at every shared-prefix boundary

The last reader of the single position takes the tuple; the property that stood
for it goes.
""",
    edits=(
        Edit(
            _OFFLOADING,
            at="if req.shared_prefix_boundary:",
            until="(req.shared_prefix_boundary,)",
            put="reachable_boundaries += req.shared_prefix_boundaries",
        ),
        Edit(
            "vllm/v1/request.py",
            at="    @property\n    def shared_prefix_boundary(",
            until="default=0)\n\n",
            put="",
        ),
        Edit(
            "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py",
            at="request.shared_prefix_boundary = 0",
            put="request.shared_prefix_boundaries = ()",
        ),
    ),
)

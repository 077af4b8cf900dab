# SPDX-License-Identifier: Apache-2.0
"""Which file an engine records to."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.support import (
    full,
    groups,
    kv_cache_config,
    swa,
    uninstall_hooks,
    vllm_config,
)
from vllm.junctions.overlay.drop_in import MooncakeStoreConnector


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    made = []

    def record(rank: int | None = None):
        extra = {"junctions_record": str(tmp_path / "traffic.jsonl")}
        config = vllm_config(tmp_path, extra)
        if rank is not None:
            config.parallel_config.data_parallel_size = 2
            config.parallel_config.data_parallel_rank = rank
        cache = kv_cache_config(groups([full(32), swa(32, 64)]), 32)
        made.append(MooncakeStoreConnector(config, KVConnectorRole.SCHEDULER, cache))
        return made[-1]

    yield record
    uninstall_hooks()
    for connector in made:
        connector.connector_scheduler.client.close()
        connector.shutdown()


def test_engines_of_one_server_write_files_of_their_own(record, tmp_path):
    for rank in (0, 1):
        record(rank)
    names = {path.name for path in tmp_path.glob("traffic*")}
    assert names == {"traffic.dp0.jsonl", "traffic.dp1.jsonl"}


def test_a_recording_connector_keeps_its_name_and_is_one_of_ours(record, tmp_path):
    connector = record()
    assert isinstance(connector, MooncakeStoreConnector)
    assert type(connector).__name__ == "MooncakeStoreConnector"
    assert (tmp_path / "traffic.jsonl").exists()

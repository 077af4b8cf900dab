# SPDX-License-Identifier: Apache-2.0
"""The lookup server of rank 0, whose answers carry junctions."""

from collections.abc import Sequence
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreSendingThread,
    LookupKeyServer,
    MooncakeStoreWorker,
)
from vllm.v1.core.kv_cache_utils import BlockHash

from vllm.junctions.lookup.wire import JunctionLookupResult, add_junctions


class ServedWorker:
    """All that vLLM's lookup server asks of a worker.

    Its thread encodes what this answers right away, in one closure: here is the one
    place where junctions become entries that stock's encoding knows.

    Args:
        worker: The worker of rank 0.
    """

    def __init__(self, worker: MooncakeStoreWorker) -> None:
        self._worker = worker

    def lookup(
        self, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> MooncakeLookupResult:
        """Look up a request's prefix; junctions are entries of the answer."""
        result = self._worker.lookup(num_tokens, block_hashes)
        if isinstance(result, JunctionLookupResult):
            return add_junctions(result, result.junctions)
        return result

    @property
    def kv_send_thread(self) -> KVCacheStoreSendingThread | None:
        """Whose saves a reset waits for."""
        return self._worker.kv_send_thread

    @property
    def store(self) -> Any:
        """What a reset empties."""
        return self._worker.store


class JunctionLookupServer(LookupKeyServer):
    """The stock lookup server, whose answers carry junctions as sentinel entries."""

    def __init__(
        self, store_worker: MooncakeStoreWorker, vllm_config: VllmConfig
    ) -> None:
        served = cast(MooncakeStoreWorker, ServedWorker(store_worker))
        super().__init__(served, vllm_config)

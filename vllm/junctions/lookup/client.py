# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the lookup channel: answers checked, junctions taken out."""

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    LookupKeyClient,
)
from vllm.v1.core.kv_cache_utils import BlockHash

from vllm.junctions.config import JunctionsConfig
from vllm.junctions.lookup.wire import (
    HitUnits,
    JunctionLookupResult,
    check_lookup_result,
    take_junctions,
)
from vllm.junctions.metrics.counted import JunctionCounters
from vllm.junctions.metrics.lookup_report import LookupOutcome


class JunctionLookupClient(LookupKeyClient):
    """The stock lookup client, which reads junctions and checks answers."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.counters = JunctionCounters()
        # Set by the scheduler, which resolves them from the KV cache config.
        self.hit_units = HitUnits()
        self._junctions_by_request: dict[str, tuple[int, ...]] = {}
        # Whoever bounds the wait for answers reads it.
        config = JunctionsConfig.of(vllm_config)
        self.lookup_timeout_ms = config.junctions_lookup_timeout_ms

    def _lookup(
        self, num_tokens: int, block_hashes: list[BlockHash]
    ) -> MooncakeLookupResult:
        # On the client's own thread.
        try:
            answer = super()._lookup(num_tokens, block_hashes)
            result = take_junctions(answer, num_tokens)
            check_lookup_result(result, num_tokens, self.hit_units)
        except TimeoutError:
            self.counters.add_fault(
                "timed_out_lookups",
                "A store lookup was not answered within "
                f"{self.lookup_timeout_ms} ms and counts as no hit; lookups pause "
                "until the server may be back.",
            )
            self.counters.add_lookup(LookupOutcome.TIMEOUT)
            return MooncakeLookupResult(0)
        except ValueError as error:
            self.counters.add_fault(
                "malformed_payloads",
                f"A store lookup answer is malformed and counts as no hit: {error}.",
            )
            return MooncakeLookupResult(0)
        if result.num_dropped:
            self.counters.add_fault(
                "dropped_entries",
                f"Dropped {result.num_dropped} junction(s) outside a request of "
                f"{num_tokens} tokens.",
                result.num_dropped,
            )
        return result

    def lookup(
        self,
        req_id: str,
        num_tokens: int,
        block_hashes: list[BlockHash],
        non_block: bool = False,
    ) -> MooncakeLookupResult | None:
        """Look up a prefix; None while a non-blocking lookup is under way.

        Source: extends ``LookupKeyClient.lookup``. The junctions of a finished
        lookup wait for :meth:`take_junctions`.
        """
        result = super().lookup(req_id, num_tokens, block_hashes, non_block)
        if isinstance(result, JunctionLookupResult):
            self._junctions_by_request[req_id] = result.junctions
        return result

    def take_junctions(self, req_id: str) -> tuple[int, ...] | None:
        """Return the junctions of the lookup that just finished, once.

        None if no lookup of this request finished well since the last call.
        """
        return self._junctions_by_request.pop(req_id, None)

    def discard(self, req_id: str) -> None:
        """Drop what is kept for a request that ended."""
        self._junctions_by_request.pop(req_id, None)
        super().discard(req_id)

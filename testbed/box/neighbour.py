# SPDX-License-Identifier: Apache-2.0
"""Engines of another connector and of none, in the process of engines in a box."""

from dataclasses import replace

from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from testbed.box.config import (
    HASH_FUNCTION,
    EngineOptions,
    make_kv_cache_config,
    make_vllm_config,
)
from testbed.box.layout import Layout
from testbed.box.requests import make_request

# What one step schedules, tokens and block tables of each request, and the blocks that
# are cached then.
Scheduled = tuple[dict[str, int], dict[str, tuple[list[int], ...]], set[int]]

_NUM_BLOCKS = 1024
_SAMPLED = 7
_MAX_STEPS = 1000


class Neighbour:
    """vLLM's scheduler without our connector.

    It knows nothing of stores or junctions; nothing that another engine does may
    change what it schedules.

    Attributes:
        steps: What each step scheduled.
    """

    def __init__(
        self,
        layout: Layout,
        options: EngineOptions,
        connector: str | None,
        num_blocks: int = _NUM_BLOCKS,
    ) -> None:
        """Make an engine of its own.

        Args:
            layout: Its KV-cache layout.
            options: As for other engines, but for what concerns the store.
            connector: Name of its connector; None for none. It gets no worker:
                ``DecodeBenchConnector``, which fills KV caches for benchmarks, will do.
            num_blocks: Blocks of its KV cache.
        """
        options = replace(options, side="stock", num_blocks=num_blocks, extra_config={})
        config = make_vllm_config(layout, options)
        config.kv_transfer_config = connector and KVTransferConfig(
            kv_connector=connector, kv_role="kv_both"
        )
        kv_cache_config, block_tokens, hash_tokens = make_kv_cache_config(
            layout, options, config
        )
        self._hasher = get_request_block_hasher(hash_tokens, HASH_FUNCTION)
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
        )
        self._num_served = 0
        self.steps: list[Scheduled] = []

    def serve(self, prompt: list[int]) -> None:
        """Run a request to its end."""
        scheduler = self._scheduler
        self._num_served += 1
        scheduler.add_request(
            make_request(prompt, f"neighbour {self._num_served}", 2, self._hasher)
        )
        for _ in range(_MAX_STEPS):
            if not scheduler.has_requests():
                return
            self._step()
        raise RuntimeError("the neighbour's request is still running")

    def _step(self) -> None:
        output = self._scheduler.schedule()
        req_ids = list(output.num_scheduled_tokens)
        manager = self._scheduler.kv_cache_manager
        tables = {req_id: manager.get_block_ids(req_id) for req_id in req_ids}
        cached = {
            block.block_id
            for block in manager.block_pool.blocks
            if block.block_hash is not None
        }
        self.steps.append((dict(output.num_scheduled_tokens), tables, cached))
        requests = [self._scheduler.requests[req_id] for req_id in req_ids]
        sampled = [[_SAMPLED] if _is_prefilled(one) else [] for one in requests]
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
                sampled_token_ids=sampled,
            ),
        )

    def close(self) -> None:
        self._scheduler.shutdown()


def _is_prefilled(request: Request) -> bool:
    return request.num_computed_tokens >= request.num_tokens

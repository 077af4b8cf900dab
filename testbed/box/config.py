# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration for an engine in a box, by the real constructors."""

import functools
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig

from testbed.box import environment
from testbed.box.layout import Layout
from testbed.models import LLAMA_EAGLE

HASH_FUNCTION = sha256
MAX_MODEL_TOKENS = 16384

# ``stock``: vLLM's own connector, as if this package were not installed.
# ``off``: through the plugin, switched off. ``on``: with junctions.
# ``patched``: vLLM's own connector too, in a vLLM that has the in-tree series.
Side = Literal["stock", "off", "on", "patched"]

_STOCK_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector"


@dataclass(frozen=True)
class EngineOptions:
    """How an engine differs from the next one.

    Attributes:
        side: Which connector it runs.
        num_blocks: Blocks of its KV cache, the null block included.
        max_batched_tokens: Tokens of one step, i.e. the size of a prefill chunk.
        max_requests: Requests that run at once.
        role: As ``kv_role``.
        extra_config: Further keys of ``kv_connector_extra_config``.
        load_failure_policy: As ``kv_load_failure_policy``.
        policy: As ``scheduling_policy``: ``fcfs`` or ``priority``.
    """

    side: Side = "on"
    num_blocks: int = 4096
    max_batched_tokens: int = 8192
    max_requests: int = 8
    role: str = "kv_both"
    extra_config: dict[str, Any] = field(default_factory=dict)
    load_failure_policy: str = "fail"
    policy: Literal["fcfs", "priority"] = "fcfs"


def is_patched() -> bool:
    """Whether this process's vLLM has to have the in-tree series.

    ``JUNCTIONS_SIDE=patched`` says so: whatever is to run with junctions then runs
    without this package.
    """
    return os.environ.get("JUNCTIONS_SIDE") == "patched"


def acting_side(side: Side) -> Side:
    """Return the side that an engine of ``side`` runs in this process.

    Raises:
        RuntimeError: This process's vLLM cannot be that side.
    """
    acting: Side = "patched" if side == "on" and is_patched() else side
    # The overlay has a class of its own for it.
    has_series = any(field.name == "junctions" for field in fields(ReqMeta))
    if has_series != (acting == "patched"):
        raise RuntimeError(
            f"an engine of side {acting!r} needs a vLLM "
            f"{'with' if acting == 'patched' else 'without'} the in-tree series"
        )
    return acting


@functools.cache
def _models() -> tuple[ModelConfig, SpeculativeConfig]:
    """Any model will do: the box replaces its KV-cache groups."""
    arguments = LLAMA_EAGLE.write(environment.work_dir())
    target = arguments[arguments.index("--model") + 1]
    draft = Path(target).with_name(f"{LLAMA_EAGLE.name}-draft")
    model = ModelConfig(
        model=target,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_TOKENS,
    )
    speculative = SpeculativeConfig(
        method="eagle",
        model=str(draft),
        num_speculative_tokens=1,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )
    return model, speculative


def _transfer_config(options: EngineOptions) -> KVTransferConfig:
    extra_config = dict(options.extra_config)
    module_path = None
    side = acting_side(options.side)
    if side in ("stock", "patched"):
        module_path = _STOCK_MODULE
    else:
        extra_config["junctions"] = side == "on"
        # However busy the machine: only tests of the bound are to meet it.
        extra_config.setdefault("junctions_lookup_timeout_ms", 60_000)
    return KVTransferConfig(
        kv_connector="MooncakeStoreConnector",
        kv_connector_module_path=module_path,
        kv_role=options.role,
        kv_connector_extra_config=extra_config,
        kv_load_failure_policy=options.load_failure_policy,
    )


def make_vllm_config(layout: Layout, options: EngineOptions) -> VllmConfig:
    """Build the configuration as an engine core leaves it for its scheduler."""
    model, speculative = _models()
    block_tokens = min(group.block_tokens for group in layout.groups)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=options.max_requests,
            max_num_batched_tokens=options.max_batched_tokens,
            max_model_len=MAX_MODEL_TOKENS,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
            watermark=0.0,
            policy=options.policy,
        ),
        kv_transfer_config=_transfer_config(options),
        speculative_config=speculative if layout.drops_eagle_block else None,
    )
    # The rest is known to an engine core only once the model has been loaded.
    cache = config.cache_config
    cache.block_size = block_tokens
    cache.num_gpu_blocks = options.num_blocks
    cache.prefix_match_unit = layout.hash_tokens if len(layout.groups) > 1 else None
    if layout.has_mamba:
        cache.mamba_cache_mode = "align"
        cache.enable_mamba_shared_prefix_checkpoint = layout.mamba_junction_checkpoints
    environment.prepare(config, HASH_FUNCTION)
    return config


def make_kv_cache_config(
    layout: Layout, options: EngineOptions, vllm_config: VllmConfig
) -> tuple[KVCacheConfig, int, int]:
    """Return the KV cache configuration, scheduler and hash block size in tokens."""
    kv_cache_config = layout.kv_cache_config(options.num_blocks)
    block_tokens, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(
        kv_cache_config, vllm_config
    )
    kv_cache_config.hash_block_size = hash_tokens
    kv_cache_config.cache_hit_alignment_tokens = (
        kv_cache_utils.resolve_cache_hit_alignment_tokens(
            kv_cache_config, vllm_config, block_tokens, hash_tokens
        )
    )
    return kv_cache_config, block_tokens, hash_tokens

# SPDX-License-Identifier: Apache-2.0
"""What of vLLM this package stands on, and whether the running one has it.

Nothing here imports the Mooncake store: the plugin asks these questions in every
process of every engine.
"""

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm.junctions.errors import UnsupportedRuntimeError

# Minor releases that the hooks were written for and tested with.
SUPPORTED_MINORS = ((0, 32), (0, 33))
SUPPORTED_TEXT = "0.32.x and 0.33.x"

_STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"
STORE_CONNECTOR = f"{_STORE}.connector"
STORE_COORDINATOR = f"{_STORE}.coordinator"
STORE_DATA = f"{_STORE}.data"
STORE_SCHEDULER = f"{_STORE}.scheduler"
STORE_WORKER = f"{_STORE}.worker"
CACHE_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
# Of a lookup result and of store_mask (with self) without junctions.
_NUM_RESULT_FIELDS, _NUM_MASK_PARAMETERS = 2, 4
CONFIG = "vllm.config"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@dataclass(frozen=True)
class Seam:
    """A callable of vLLM that this package overrides, wraps or calls.

    Attributes:
        target: ``module:qualified.name``.
        parameters: Parameters that we rely on, in order, without ``self``/``cls``.
            More may follow if they are optional.
    """

    target: str
    parameters: tuple[str, ...]


# Methods that the store-side subclasses override or call. The hooks into core
# carry their own contracts (``Hook.parameters``).
STORE_SEAMS = (
    Seam(
        f"{STORE_CONNECTOR}:MooncakeStoreConnector.__init__",
        ("vllm_config", "role", "kv_cache_config"),
    ),
    Seam(
        f"{STORE_SCHEDULER}:MooncakeStoreScheduler.__init__",
        ("vllm_config", "kv_cache_config"),
    ),
    Seam(
        f"{STORE_SCHEDULER}:MooncakeStoreScheduler.get_num_new_matched_tokens",
        ("request", "num_computed_tokens"),
    ),
    Seam(
        f"{STORE_SCHEDULER}:MooncakeStoreScheduler.update_state_after_alloc",
        ("request", "blocks", "num_external_tokens"),
    ),
    Seam(
        f"{STORE_SCHEDULER}:MooncakeStoreScheduler.build_connector_meta",
        ("scheduler_output",),
    ),
    Seam(
        f"{STORE_SCHEDULER}:MooncakeStoreScheduler.update_connector_output",
        ("connector_output",),
    ),
    Seam(f"{STORE_WORKER}:LookupKeyClient.__init__", ("vllm_config",)),
    Seam(f"{STORE_WORKER}:LookupKeyClient._lookup", ("num_tokens", "block_hashes")),
    Seam(
        f"{STORE_WORKER}:LookupKeyClient.lookup",
        ("req_id", "num_tokens", "block_hashes", "non_block"),
    ),
    Seam(f"{STORE_WORKER}:LookupKeyClient.discard", ("req_id",)),
    Seam(f"{STORE_WORKER}:get_zmq_rpc_path_lookup", ("vllm_config",)),
    Seam(f"{STORE_WORKER}:LookupKeyServer.__init__", ("store_worker", "vllm_config")),
    Seam(f"{STORE_WORKER}:KVCacheStoreSendingThread._handle_request", ("req_meta",)),
    Seam(f"{STORE_WORKER}:KVCacheStoreSendingThread._boundary_puts", ("req_meta",)),
    Seam(
        f"{STORE_WORKER}:KVCacheStoreSendingThread._record_saved",
        ("req_meta", "token_len"),
    ),
    Seam(f"{STORE_WORKER}:MooncakeStoreWorker.get_kv_connector_stats", ()),
    Seam(
        f"{STORE_DATA}:ChunkedTokenDatabase.process_tokens",
        (
            "token_len",
            "block_hashes",
            "mask_num",
            "chunk_mask",
            "put_step",
            "put_step_rank",
        ),
    ),
    Seam(f"{STORE_DATA}:StoreLayout.key_for", ("shard_id", "chunk_hash")),
    Seam(f"{STORE_WORKER}:MooncakeStoreConfig.load_from_config", ()),
    Seam(f"{STORE_CONNECTOR}:MooncakeStoreConnector.get_kv_connector_stats", ()),
    Seam(
        f"{STORE_CONNECTOR}:MooncakeStoreConnector.build_kv_connector_stats", ("data",)
    ),
    Seam(
        f"{STORE_CONNECTOR}:MooncakeStoreConnector.build_prom_metrics",
        (
            "vllm_config",
            "metric_types",
            "labelnames",
            "per_engine_labelvalues",
        ),
    ),
    Seam(
        f"{STORE_WORKER}:MooncakeStoreWorker.__init__",
        ("vllm_config", "kv_cache_config"),
    ),
    Seam(f"{STORE_WORKER}:MooncakeStoreWorker.register_kv_caches", ("kv_caches",)),
    Seam(f"{STORE_WORKER}:MooncakeStoreWorker.lookup", ("num_tokens", "block_hashes")),
    Seam(
        f"{STORE_WORKER}:MooncakeStoreWorker._tail_key_boundaries",
        ("block_hashes", "hit_length", "cached_block_pool"),
    ),
    Seam(f"{STORE_WORKER}:MooncakeStoreWorker._init_lookup_key_prefixes", ()),
    Seam(
        f"{STORE_WORKER}:MooncakeStoreWorker._record_kv_connector_operation",
        ("operation", "duration_seconds", "num_keys"),
    ),
    Seam(f"{STORE_DATA}:PoolKey.build_key_string", ("key_prefix", "chunk_hash")),
    Seam(
        f"{STORE_COORDINATOR}:MooncakeStoreCoordinator.find_longest_cache_hit",
        ("block_hashes", "max_length", "cached_block_pool"),
    ),
    Seam(
        f"{CACHE_MANAGERS}:SlidingWindowManager._contiguous_blocks_for_hit",
        ("window_size", "block_size", "use_eagle"),
    ),
    Seam(
        f"{STORE_COORDINATOR}:MooncakeStoreCoordinator.store_mask",
        ("aligned_token_len", "start_token", "num_prompt_tokens"),
    ),
    Seam(
        f"{STORE_COORDINATOR}:MooncakeStoreCoordinator.align_lookup_length",
        ("length",),
    ),
)


def vllm_version() -> str:
    """Return the version of the running vLLM, under whichever name it came."""
    return str(importlib.import_module("vllm.version").__version__)


def is_supported_version(version: str) -> bool:
    """Return whether the hooks were written for ``version``.

    ``0.32.0``, ``0.32.1.dev3+g12`` and ``0.33.0+cu130`` are; ``0.31.0`` and
    ``dev`` are not.
    """
    try:
        return Version(version).release[:2] in SUPPORTED_MINORS
    except InvalidVersion:
        return False


def check_version() -> None:
    """Refuse a vLLM that the hooks were not written for.

    Raises:
        UnsupportedRuntimeError: Names the found and the supported versions.
    """
    version = vllm_version()
    if not is_supported_version(version):
        raise UnsupportedRuntimeError(
            f"vllm-junctions does not support vLLM {version}; supported are "
            f"{SUPPORTED_TEXT}. Install a supported vLLM, a vllm-junctions that "
            "supports yours, or run without it: pip uninstall vllm-junctions"
        )


def has_native_core() -> bool:
    """Return whether requests of the running vLLM keep several junctions."""
    request_cls = importlib.import_module("vllm.v1.request").Request
    found = request_cls.__dict__.get("shared_prefix_boundaries")
    if found is not None:
        return not getattr(found, "from_vllm_junctions", False)
    return "shared_prefix_boundaries" in request_cls.__init__.__code__.co_names


def has_native_store() -> bool:
    """Return whether store lookups of the running vLLM report junctions.

    Told by what they can carry, not by a name: a lookup result and a store mask that
    know of more than the hit and the prompt's own tails.
    """
    data = importlib.import_module(STORE_DATA)
    coordinator = importlib.import_module(STORE_COORDINATOR).MooncakeStoreCoordinator
    fields = getattr(data.MooncakeLookupResult, "__dataclass_fields__", {})
    parameters = inspect.signature(coordinator.store_mask).parameters
    return len(fields) > _NUM_RESULT_FIELDS and len(parameters) > _NUM_MASK_PARAMETERS


def resolve(target: str) -> tuple[Any, str, Any]:
    """Find ``module:qualified.name``.

    Returns:
        ``(owner, name, value)``, so that ``setattr(owner, name, ...)`` replaces it.

    Raises:
        UnsupportedRuntimeError: The running vLLM has no such thing.
    """
    module_name, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        value = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedRuntimeError(
            f"vLLM {vllm_version()} has no {target} ({error}); "
            f"supported are {SUPPORTED_TEXT}. Nothing was applied."
        ) from error
    return owner, name, value


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def check_seams(seams: Iterable[Seam]) -> None:
    """Check that every seam exists with the parameters that we rely on.

    Raises:
        UnsupportedRuntimeError: Names the first seam that is missing or differs.
    """
    for seam in seams:
        _, _, value = resolve(seam.target)
        function = getattr(value, "__func__", value)
        signature = inspect.signature(function).parameters
        found = tuple(name for name in signature if name not in ("self", "cls"))
        added = found[len(seam.parameters) :]
        if found[: len(seam.parameters)] != seam.parameters or any(
            _is_required(signature[name]) for name in added
        ):
            raise UnsupportedRuntimeError(
                f"{seam.target} of vLLM {vllm_version()} takes {found}, but "
                f"{seam.parameters} was expected; supported are {SUPPORTED_TEXT}. "
                "Nothing was applied."
            )

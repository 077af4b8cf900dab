# SPDX-License-Identifier: Apache-2.0
"""What a process needs before an engine in a box can run in it.

Import this before anything of vLLM: settings are read when vLLM is imported.
"""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SETTINGS = {
    # A source tree without a distribution cannot tell which device it is for.
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_MOONCAKE_LOAD_RECV_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)
# Outside of a server nobody configures vLLM's loggers.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])

import torch  # noqa: E402

_work_dir: tempfile.TemporaryDirectory[str] | None = None


class CpuEvent:
    """Takes the place of ``torch.cuda.Event``: on a CPU, work is done when queued."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, *_args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def work_dir() -> Path:
    """Return this process's directory for sockets and configuration files."""
    global _work_dir
    if _work_dir is None:
        # Socket paths have a limit of about 100 characters: stay short.
        _work_dir = tempfile.TemporaryDirectory(prefix="box-")
    return Path(_work_dir.name)


def prepare(vllm_config: Any, hash_function: Callable[[Any], bytes]) -> None:
    """Set up what a vLLM CPU worker sets up: process groups and events. Idempotent.

    Args:
        vllm_config: Any configuration of this process.
        hash_function: What it hashes blocks with.
    """
    # A store save records an event although nothing of it runs on a GPU.
    torch.cuda.Event = CpuEvent  # type: ignore[misc,assignment]
    if torch.distributed.is_initialized():
        return
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    init_none_hash(hash_function)
    register_all_kvcache_specs(vllm_config)
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{work_dir() / 'rendezvous'}",
            backend="gloo",
        )
        initialize_model_parallel(1, 1)

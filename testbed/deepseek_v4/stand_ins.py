# SPDX-License-Identifier: Apache-2.0
"""Puts ``kernels`` into a running vLLM; the test bed loads it as a vLLM plugin.

Each function below takes what vLLM passes, and says so to ``kernels``.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from vllm.platforms.cpu import CpuPlatform

from testbed import random_weights
from testbed.deepseek_v4 import kernels

_METADATA = "vllm.v1.attention.ops.metadata"
_COMPRESSOR = "vllm.v1.attention.backends.mla.compressor_utils"
_SWA = "vllm.v1.attention.backends.mla.sparse_swa"
_INDEXER = "vllm.v1.attention.backends.mla.indexer"
_MARK = "_deepseek_v4_stand_ins"


class UnsupportedProcessor(RuntimeError):
    """vLLM's DeepSeek-V4 kernels do not run here."""


def register() -> None:
    """Install the stand-ins in this process, as soon as vLLM has a use for them.

    Raises:
        UnsupportedProcessor: vLLM's own DeepSeek-V4 kernels need AVX-512 with BF16.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        raise UnsupportedProcessor(
            "vLLM's CPU kernels for DeepSeek-V4 need a processor with AVX512_BF16; "
            "this one has none"
        )
    if hasattr(CpuPlatform, _MARK):
        return
    setattr(CpuPlatform, _MARK, True)
    random_weights.register()
    _wrap_class_method(CpuPlatform, "check_and_update_config", _keep_prefix_caching)
    _wrap_class_method(CpuPlatform, "register_triton_kernel_overrides", _add_kernels)


def _wrap_class_method(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name).__func__

    def wrapped(cls: type, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, cls, *args, **kwargs)

    setattr(owner, name, classmethod(wrapped))


@contextlib.contextmanager
def _as_if_amx() -> Iterator[None]:
    with mock.patch("torch.cpu._is_amx_tile_supported", return_value=True):
        yield


def _keep_prefix_caching(original: Callable[..., Any], cls: type, *args: Any) -> None:
    # Without AMX vLLM switches prefix caching and chunked prefill off for this
    # model, for speed: its kernels run on AVX-512 too, and pass their own tests.
    with _as_if_amx():
        original(cls, *args)


def _add_kernels(original: Callable[..., Any], cls: type) -> None:
    original(cls)
    from vllm.models.deepseek_v4.cpu.cpu_mla import (
        DeepseekV4CPUSparseSWAMetadataBuilder,
    )
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.attention.backends.mla.sparse_swa import ComputeSWAIndicesAndLensKernel

    _name_every_layer_type(DeepseekV4CPUSparseSWAMetadataBuilder)
    if HAS_TRITON:
        return
    register_kernels(
        {
            f"{_METADATA}._token_request_mapping_kernel": _token_request_mapping,
            f"{_COMPRESSOR}.CompressedSlotMappingKernel.kernel": _compressed_slots,
            f"{_SWA}.ComputePrefillMetadataKernel.kernel": _prefill_metadata,
            f"{_INDEXER}.BuildPrefillChunkMetadataKernel.kernel": _prefill_chunk,
        }
    )
    # Its launch grid alone says how many rows to fill, so not through the registry.
    ComputeSWAIndicesAndLensKernel.__call__ = _window_slots


def _name_every_layer_type(builder: type) -> None:
    original = builder.build_tile_scheduler

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, Any]:
        # A CPU has no tile plan for any type of layer; 0.32.0 names three of the
        # five that its caller asks for.
        return {"c1a": None, "c2a": None, **original(self, num_decode_tokens)}

    builder.build_tile_scheduler = build_tile_scheduler


def _token_request_mapping(
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    **_launch_options: Any,
) -> None:
    kernels.request_of_each_token(
        query_start_loc, output, num_reqs, num_mapped, num_tokens
    )


def _compressed_slots(
    compressed_slot_mapping: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    _block_table_stride: int,
    block_size: int,
    dcp_world_size: int,
    _cp_interleave: int,
    compress_ratio: int,
    _pad_id: int,
    _triton_block_size: int,
) -> None:
    assert dcp_world_size == 1, f"no context parallelism here, got {dcp_world_size}"
    kernels.compressed_slots(
        compressed_slot_mapping,
        slot_mapping,
        query_start_loc,
        seq_lens,
        block_table,
        block_size,
        compress_ratio,
    )


def _prefill_metadata(
    prefill_gather_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    replay_start: torch.Tensor,
    num_prefills: int,
    num_decodes: int,
    window_size: int,
    _block_size: int,
) -> None:
    kernels.prefill_gather_lens(
        prefill_gather_lens,
        seq_lens,
        query_start_loc,
        replay_start,
        num_prefills,
        num_decodes,
        window_size,
    )


def _prefill_chunk(
    query_start_loc: torch.Tensor,
    uncompressed_seq_lens: torch.Tensor,
    cu_compressed_seq_lens: torch.Tensor,
    row_start_cu_compressed_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    cu_compressed_seq_len_ks: torch.Tensor,
    cu_compressed_seq_len_ke: torch.Tensor,
    query_slice_start: int,
    query_slice_stop: int,
    _dcp_rank: int,
    dcp_world_size: int,
    _dcp_interleave: int,
    _block_size: int,
    compress_ratio: int,
) -> None:
    assert dcp_world_size == 1, f"no context parallelism here, got {dcp_world_size}"
    kernels.prefill_rows(
        query_start_loc,
        uncompressed_seq_lens,
        cu_compressed_seq_lens,
        row_start_cu_compressed_seq_lens,
        token_to_seq,
        cu_compressed_seq_len_ks,
        cu_compressed_seq_len_ke,
        query_slice_start,
        query_slice_stop,
        compress_ratio,
    )


def _window_slots(
    _launcher: Any,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    window_size: int,
    _index_width: int,
    _left_visible: torch.Tensor,
    _right_visible: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    replay_start: torch.Tensor,
    *,
    num_tokens: int,
    token_offset: int,
    has_image: bool = False,
) -> None:
    assert not has_image, "text only"
    kernels.window_slots(
        swa_indices,
        swa_lens,
        window_size,
        query_start_loc,
        seq_lens,
        token_to_req_indices,
        is_valid_token,
        block_table,
        block_size,
        replay_start,
        num_tokens,
        token_offset,
    )

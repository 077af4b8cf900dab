# SPDX-License-Identifier: Apache-2.0
"""KV-cache groups of real models, with the specs that vLLM gives their layers.

Only what decides about prefix reuse and bytes: layer counts, block sizes, windows,
page sizes. No weights, no model classes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm.junctions.rules.tails import TailShape

LayerSpecs = dict[str, KVCacheSpec]


@dataclass(frozen=True)
class ModelLayout:
    """All KV-cache groups of a model.

    Attributes:
        name: As ``--layout`` names it.
        summary: What it stands for, in a line.
        layers_by_group: Layer specs by layer name, one dict a group.
        eagle_group_ids: Groups that hold the drafter's layers; empty without one.
    """

    name: str
    summary: str
    layers_by_group: tuple[LayerSpecs, ...]
    eagle_group_ids: frozenset[int] = frozenset()

    @property
    def groups(self) -> list[KVCacheGroupSpec]:
        return [
            _group(layers, index in self.eagle_group_ids)
            for index, layers in enumerate(self.layers_by_group)
        ]

    @property
    def block_tokens_by_group(self) -> tuple[int, ...]:
        return tuple(group.kv_cache_spec.block_size for group in self.groups)

    @property
    def scheduler_block_tokens(self) -> int:
        return math.lcm(*self.block_tokens_by_group)

    @property
    def hash_tokens(self) -> int:
        return math.gcd(*self.block_tokens_by_group)

    @property
    def full_attention_group_ids(self) -> tuple[int, ...]:
        return tuple(
            index
            for index, layers in enumerate(self.layers_by_group)
            if isinstance(next(iter(layers.values())), FullAttentionSpec)
        )

    @property
    def tails(self) -> tuple[TailShape, ...]:
        """The tails of the groups that are not full attention."""
        shapes = []
        for index, layers in enumerate(self.layers_by_group):
            spec = next(iter(layers.values()))
            if isinstance(spec, SlidingWindowSpec):
                # The token at hand is in the window too.
                num_blocks = -(-(spec.sliding_window - 1) // spec.block_size)
                shape = TailShape(
                    spec.block_size,
                    self.scheduler_block_tokens,
                    (num_blocks, num_blocks + 1),
                    drops=index in self.eagle_group_ids,
                )
                shapes.append(shape)
        return tuple(shapes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool, and so of one stored value.

        Groups take their blocks from one pool, so a block has room for the widest
        group, and the store worker puts whole blocks: a value is that long whichever
        group it is for. Of one rank; MLA layers are the same on all of them.

        Source: ``RankLocalStoreLayout.register_kv_caches``, which registers every
        layer's memory for every group.
        """
        return max(
            sum(spec.page_size_bytes for spec in layers.values())
            for layers in self.layers_by_group
        )


def _group(layers: LayerSpecs, is_eagle: bool) -> KVCacheGroupSpec:
    block_tokens = next(iter(layers.values())).block_size
    spec = UniformTypeKVCacheSpecs(block_size=block_tokens, kv_cache_specs=layers)
    return KVCacheGroupSpec(list(layers), spec, is_eagle_group=is_eagle)


def gemma3_12b_layers() -> LayerSpecs:
    """48 layers, every sixth of them full attention; bfloat16, blocks of 16."""

    def spec(layer: int) -> KVCacheSpec:
        shape = {
            "block_size": 16,
            "num_kv_heads": 8,
            "head_size": 256,
            "dtype": torch.bfloat16,
        }
        if layer % 6 == 5:
            return FullAttentionSpec(**shape)
        return SlidingWindowSpec(**shape, sliding_window=1024)

    return {f"layers.{layer}.attn": spec(layer) for layer in range(48)}


# Layers of DeepSeek-V4-Flash by the tokens that one compressed state covers: the
# first two attend to a window only, then 4 and 128 take turns.
_V4_COMPRESS_RATIOS = (0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)))
_V4_BLOCK_TOKENS = 256
_V4_PAGE_ALIGNMENT_BYTES = 576
# 448 bytes without position, 128 with, 8 of scales.
_V4_STATE_BYTES = 584
_V4_HEAD_SIZE = 512
_V4_INDEX_HEAD_SIZE = 128
_V4_INDEX_SCALE_BYTES = 4


def deepseek_v4_flash_layers(mtp: bool = True) -> LayerSpecs:
    """43 layers, and the one of the MTP module; ``fp8_ds_mla`` cache, blocks of 256.

    In the order in which vLLM registers them: per layer the compressed states, the
    indexer's, what both compressors carry, and the window.

    Source: the caches that ``vllm/models/deepseek_v4`` declares.
    """
    layers: LayerSpecs = {}
    for index, ratio in enumerate(_V4_COMPRESS_RATIOS + ((0,) if mtp else ())):
        name = f"layers.{index}.attn"
        if ratio:
            layers[name] = _v4_states(ratio, _V4_HEAD_SIZE, _V4_STATE_BYTES)
            layers[f"{name}.compressor"] = _v4_carry(ratio, _V4_HEAD_SIZE)
        if ratio == 4:
            index_bytes = _V4_INDEX_HEAD_SIZE + _V4_INDEX_SCALE_BYTES
            layers[f"{name}.indexer"] = _v4_states(ratio, index_bytes)
            layers[f"{name}.indexer.compressor"] = _v4_carry(ratio, _V4_INDEX_HEAD_SIZE)
        layers[f"{name}.swa"] = _v4_window()
    return layers


def _v4_states(
    ratio: int, head_size: int, state_bytes: int | None = None
) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=_V4_BLOCK_TOKENS,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=head_size,
        dtype=torch.uint8,
        tokens_per_state=ratio,
        state_content_bytes=state_bytes,
        alignment=_V4_PAGE_ALIGNMENT_BYTES,
        model_version="deepseek_v4" if state_bytes else None,
        cache_dtype_str="fp8_ds_mla" if state_bytes else None,
    )


def _v4_carry(ratio: int, head_size: int) -> SlidingWindowMLASpec:
    """What a compressor carries from token to token: float32 keys and scores."""
    # States of ratio 4 overlap: each covers the four tokens before it as well.
    num_windows = 2 if ratio == 4 else 1
    return SlidingWindowMLASpec(
        block_size=4 if ratio == 4 else 8,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=2 * num_windows * head_size,
        dtype=torch.float32,
        sliding_window=num_windows * ratio,
        alignment=_V4_PAGE_ALIGNMENT_BYTES,
    )


def _v4_window() -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=64,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=_V4_HEAD_SIZE,
        dtype=torch.uint8,
        sliding_window=128,
        state_content_bytes=_V4_STATE_BYTES,
        alignment=_V4_PAGE_ALIGNMENT_BYTES,
        model_version="deepseek_v4",
        cache_dtype_str="fp8_ds_mla",
    )


def _split(
    layers: LayerSpecs, *wanted: Callable[[KVCacheSpec], bool]
) -> tuple[LayerSpecs, ...]:
    return tuple(
        {name: spec for name, spec in layers.items() if is_wanted(spec)}
        for is_wanted in wanted
    )


def _dealt(layers: LayerSpecs, num_groups: int) -> tuple[LayerSpecs, ...]:
    """Deal layers out in turn, as vLLM does where one group has too many."""
    names = list(layers)
    return tuple(
        {name: layers[name] for name in names[index::num_groups]}
        for index in range(num_groups)
    )


def _gemma3_12b() -> ModelLayout:
    full, windows = _split(
        gemma3_12b_layers(),
        lambda spec: isinstance(spec, FullAttentionSpec),
        lambda spec: isinstance(spec, SlidingWindowSpec),
    )
    return ModelLayout(
        "gemma3-12b",
        "Gemma 3 12B: 8 full-attention layers, 40 with a window of 1024 in 5 groups",
        (full, *_dealt(windows, 5)),
    )


def _deepseek_v4_flash(name: str, mtp: bool) -> ModelLayout:
    layers = deepseek_v4_flash_layers(mtp)
    states, carry_4, carry_128, windows = _split(
        layers,
        *(lambda spec, size=size: spec.block_size == size for size in (256, 4, 8, 64)),
    )
    groups = (states, carry_4, carry_128, *_dealt(windows, 2))
    last_layer = next(reversed(layers))
    # vLLM finds the MTP module's group by the layer that is registered last.
    eagle = {index for index, group in enumerate(groups) if last_layer in group}
    return ModelLayout(
        name,
        "DeepSeek-V4-Flash: groups of 256, 4, 8, 64 and 64 tokens per block"
        + (", MTP on" if mtp else ", no MTP"),
        groups,
        frozenset(eagle if mtp else ()),
    )


LAYOUTS = {
    layout.name: layout
    for layout in (
        _deepseek_v4_flash("deepseek-v4-flash", mtp=True),
        _deepseek_v4_flash("deepseek-v4-flash-no-mtp", mtp=False),
        _gemma3_12b(),
    )
}
DEFAULT_LAYOUT = "deepseek-v4-flash"

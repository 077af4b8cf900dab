# SPDX-License-Identifier: Apache-2.0
"""The layouts of real models are the ones that vLLM makes of their layers."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm.config import CacheConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    KeyMetadata,
    RankLocalStoreLayout,
)
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tests.unit.plan.layouts import layout_of
from tests.unit.plan.reference.models import (
    LAYOUTS,
    deepseek_v4_flash_layers,
    gemma3_12b_layers,
)
from vllm.junctions.plan.layouts import LAYOUTS as PLANNED

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planning

LAYERS = {
    "deepseek-v4-flash": deepseek_v4_flash_layers(),
    "deepseek-v4-flash-no-mtp": deepseek_v4_flash_layers(mtp=False),
    "gemma3-12b": gemma3_12b_layers(),
}


def grouping_config(mtp: bool) -> SimpleNamespace:
    """What vLLM's grouping reads of a configuration; a real one needs the model."""
    cache = CacheConfig()
    cache.kv_cache_layout = "BLHNC"
    cache.num_gpu_blocks_override = None
    speculative = SimpleNamespace(
        method="mtp", use_eagle=lambda: True, use_eagle_block_drop=lambda: True
    )
    return SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=speculative if mtp else None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="")),
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_are_those_that_vllm_makes(name):
    layout = LAYOUTS[name]
    config = grouping_config(mtp=bool(layout.eagle_group_ids))
    expected = planning.get_kv_cache_groups(config, LAYERS[name])
    if not hasattr(planning, "_annotate_eagle_groups"):
        # From 0.33 on the flag is set later, on groups with a layer of the drafter.
        for group in expected:
            group.is_eagle_group = bool(layout.eagle_group_ids) and any(
                layer.startswith("layers.43.") for layer in group.layer_names
            )
    assert _summaries(layout.groups) == _summaries(expected)


def _summaries(groups):
    return {
        (frozenset(g.layer_names), g.kv_cache_spec.block_size, g.is_eagle_group)
        for g in groups
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plans_layouts_are_those_of_the_models(name):
    found = msgspec.structs.replace(
        layout_of(LAYOUTS[name]),
        summary=PLANNED[name].summary,
        speculative=PLANNED[name].speculative,
    )
    assert found == PLANNED[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_stored_value_is_a_whole_block_whatever_its_group(name):
    """Measured on real memory, through the layout that the store worker uses."""
    layout = LAYOUTS[name]
    groups = layout.groups
    config = planning.get_kv_cache_config_from_groups(
        grouping_config(mtp=False), groups, 3 * layout.block_bytes
    )
    assert config.num_blocks == 3
    memory = allocate_kv_cache(
        config, torch.device("cpu"), KVCacheLayout["BLHNC"], None
    )
    for group in groups:
        block_tokens = group.kv_cache_spec.block_size
        store_layout = RankLocalStoreLayout(
            KeyMetadata("model", 0, 0, 0, 0), block_tokens, layout.hash_tokens
        )
        store_layout.register_kv_caches(list(memory.values()), config.num_blocks)
        _, sizes, _ = store_layout.prepare_values([(0, block_tokens)], [1], [0])
        assert sum(sizes[0]) == layout.block_bytes

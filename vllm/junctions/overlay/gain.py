# SPDX-License-Identifier: Apache-2.0
"""Whether junctions can gain anything on a layout."""

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec


def nothing_to_gain(kv_cache_config: KVCacheConfig | None) -> str | None:
    """Say why junctions cannot gain anything; None if they can.

    They gain where some group keeps its tails or states sparsely: with full
    attention alone a prefix is usable as far as it is stored, and dense retention
    keeps tails everywhere. Mamba states exist only where prefill chunks end, under
    dense retention too.

    Args:
        kv_cache_config: The engine's; None where it is not known yet.
    """
    if kv_cache_config is None:
        return None
    specs = [group.kv_cache_spec for group in kv_cache_config.prefix_cacheable_groups]
    sparse = [spec for spec in specs if not isinstance(spec, FullAttentionSpec)]
    if len(specs) < 2 or not sparse:
        return "prefixes are cached by full attention alone, or by a single group"
    dense = kv_cache_config.prefix_cache_retention_interval is None
    if dense and not any(_is_mamba(spec) for spec in sparse):
        return "retention is dense (prefix_cache_retention_interval is None)"
    return None


def _is_mamba(spec: Any) -> bool:
    return isinstance(spec, MambaSpec)

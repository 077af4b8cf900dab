# SPDX-License-Identifier: Apache-2.0
"""Manager classes of sparse groups, for lookups: the pool searches, and asks for keys.

vLLM's search of a sliding-window or Mamba group reads every block on its way down. A
pool that has to ask for each answer knows better where to look first.
"""

import functools
from typing import Any, Protocol, cast

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


class TailPool(Protocol):
    """A pool that searches in sparse groups by itself."""

    def longest_tail_hit(
        self, group_ids: list[int], max_length: int, drop: bool
    ) -> int:
        """Return the longest hit of the sparse groups of one spec, in tokens.

        Args:
            group_ids: The groups.
            max_length: Tokens that may be matched, the proof block included.
            drop: Whether the last matched block is dropped.
        """
        ...


class PoolSearch:
    """Goes before a manager class: its search of the cache is the pool's."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Return no blocks, since lookups use none, and the longest hit in tokens.

        Source: as ``SlidingWindowManager.find_longest_cache_hit`` and
        ``MambaManager.find_longest_cache_hit``.
        """
        pool = cast(TailPool, block_pool)
        length = pool.longest_tail_hit(kv_cache_group_ids, max_length, drop_eagle_block)
        return tuple([] for _ in kv_cache_group_ids), length


@functools.cache
def searched_by_pool(
    manager_cls: type[SingleTypeKVCacheManager],
) -> type[SingleTypeKVCacheManager]:
    """Return a manager class as it is, but for who searches."""
    name = f"PoolSearched{manager_cls.__name__}"
    return cast(
        type[SingleTypeKVCacheManager], type(name, (PoolSearch, manager_cls), {})
    )

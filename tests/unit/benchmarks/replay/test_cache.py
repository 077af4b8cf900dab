# SPDX-License-Identifier: Apache-2.0
import random
from collections import OrderedDict

import numpy as np
import pytest

from benchmarks.replay.cache import BlockCache


def use(cache, *keys):
    return cache.use(np.array(keys, dtype=np.int64))


def cached(cache, num_keys=10):
    return np.flatnonzero(cache.cached(np.arange(num_keys))).tolist()


def test_without_a_bound_nothing_goes():
    cache = BlockCache(10)
    assert use(cache, 1, 2, 3) == 3
    assert use(cache, 3, 4) == 1
    assert cached(cache) == [1, 2, 3, 4]
    assert (cache.num_blocks, cache.num_evicted) == (4, 0)


def test_the_least_recently_used_go_first():
    cache = BlockCache(10, 4)
    use(cache, 1, 2)
    use(cache, 3, 4)
    use(cache, 1)
    assert use(cache, 5) == 1
    assert cached(cache) == [1, 3, 4, 5]
    assert (cache.num_blocks, cache.num_evicted) == (4, 1)


def test_of_one_use_the_last_go_first():
    cache = BlockCache(10, 4)
    use(cache, 1, 2, 3)
    use(cache, 8, 9)
    assert cached(cache) == [1, 2, 8, 9]
    use(cache, 7)
    assert cached(cache) == [1, 7, 8, 9]


def test_more_than_there_is_room_for_leaves_the_first():
    cache = BlockCache(10, 3)
    assert use(cache, 5, 6, 7, 8, 9) == 5
    assert cached(cache) == [5, 6, 7]
    assert cache.num_evicted == 2


@pytest.mark.parametrize("seed", range(5))
def test_it_is_an_lru_cache(seed):
    rng = random.Random(seed)
    cache, expected = BlockCache(40, 12), OrderedDict()
    for _ in range(300):
        keys = rng.sample(range(40), rng.randint(1, 6))
        use(cache, *keys)
        # The last of a use is the first to go, so it counts as the oldest.
        for key in reversed(keys):
            expected.pop(key, None)
            expected[key] = None
        while len(expected) > 12:
            expected.popitem(last=False)
        assert cached(cache, 40) == sorted(expected)
        assert cache.num_blocks == len(expected)

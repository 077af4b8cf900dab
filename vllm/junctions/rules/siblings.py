# SPDX-License-Identifier: Apache-2.0
"""Who shares with whom, and where they part: what lookups teach an instance.

Bounded memory of the prompts that came by, and of how far from the end of a prompt
its next sibling parted. Nothing in this module knows about vLLM's objects.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

# What a prefix of so many tokens goes by: equal for equal prefixes.
PrefixKey = Callable[[int], Hashable]

# Prompts after which what was learned counts half: what no longer happens is
# forgotten within a few of these, and a rate of a few percent is still seen.
_HALF_LIFE_PROMPTS = 500
# By how much with each prompt.
FADE = 0.5 ** (1 / _HALF_LIFE_PROMPTS)
_PROMPTS_PER_DECAY = 50
# What one kind of prompt has to show before it counts more than all prompts do.
_POOL_PROMPTS = 16
# Prompts without a sibling that are taken for granted at the start.
_PRIOR_PROMPTS = 2
_STEPS_PER_OCTAVE = 4
_MAX_BLOCKS = 1 << 16
_NUM_KINDS = _MAX_BLOCKS.bit_length() + 1


def ladder(steps_per_octave: int) -> np.ndarray:
    """Return numbers of blocks, one by one at first, then in growing steps.

    With two steps per octave: 1, 2, 3, 4, 6, 8, 12, 16, 24 ... 65536.
    """
    rungs = list(range(1, 2 * steps_per_octave))
    step = 2
    while rungs[-1] < _MAX_BLOCKS:
        rungs += [step * rung for rung in range(steps_per_octave, 2 * steps_per_octave)]
        step *= 2
    return np.array([rung for rung in rungs if rung <= _MAX_BLOCKS])


def _sums_of_one(num_distances: int, num_octaves: int = 3) -> np.ndarray:
    """Return what one sibling adds to sums over distances, by where it was seen.

    ``[i, 0, j]``, of one seen at distance ``i``: 1 if that is one of the ``j``
    shortest. ``[i, 1, j]``: what becomes of it where another one like it is expected
    further off instead. That is up to three octaves further off, in each half as
    likely as in the one before.
    """
    octaves = 0.5 ** np.arange(1, num_octaves + 1)
    shares = np.repeat(octaves / octaves.sum(), _STEPS_PER_OCTAVE) / _STEPS_PER_OCTAVE
    seen = np.eye(num_distances)
    moved_off = sum(
        share * np.eye(num_distances, k=step)
        for step, share in enumerate(shares, start=1)
    )
    sums = np.zeros((num_distances, 2, num_distances + 1))
    sums[:, :, 1:] = np.stack([seen, moved_off - seen], axis=1).cumsum(axis=2)
    return sums


class Owner(NamedTuple):
    """A prompt that came by.

    Attributes:
        num_tokens: Its length.
        num_added_tokens: What of it lies above all tails that were known of it.
        tails: Positions of the predicted tails that it was to keep.
    """

    num_tokens: int
    num_added_tokens: int
    tails: tuple[int, ...]


class PrefixOwners:
    """The last prompt that computed a prefix's end, for a bounded number of prefixes.

    A prompt is remembered by a few of its prefixes: every block at first, then four
    per doubling, so that a prompt of 131,072 tokens in blocks of 256 takes 32 of the
    ``max_prefixes``. The older half goes at once, which costs the least.
    """

    def __init__(self, block_tokens: int, max_prefixes: int = 1 << 15) -> None:
        self._marks: list[int] = (ladder(_STEPS_PER_OCTAVE) * block_tokens).tolist()
        self._max_half = max_prefixes // 2
        self._newer: dict[Hashable, Owner] = {}
        self._older: dict[Hashable, Owner] = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, owner: Owner, computed_from: int, prefix_key: PrefixKey) -> None:
        """Make a prompt the owner of the prefixes that end in what it computes.

        Only there it has what a tail needs; below its hit, tails are others' matter.
        """
        end = bisect_right(self._marks, owner.num_tokens)
        first = max(bisect_right(self._marks, computed_from), end - self._max_half)
        if len(self._newer) + end - first > self._max_half:
            self._older, self._newer = self._newer, {}
        newer = self._newer
        for mark in self._marks[first:end]:
            newer[prefix_key(mark)] = owner

    def find(self, num_tokens: int, prefix_key: PrefixKey) -> Owner | None:
        """Return who computed the last remembered position up to ``num_tokens``."""
        index = bisect_right(self._marks, num_tokens)
        if not index:
            return None
        key = prefix_key(self._marks[index - 1])
        return self._newer.get(key) or self._older.get(key)


class UnusedTails:
    """Tails that nobody has hit yet, by what the prefix below goes by.

    Bounded: the oldest go first.
    """

    def __init__(self, max_tails: int = 1 << 12) -> None:
        self._max_tails = max_tails
        self._without_tokens: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._without_tokens)

    def add(self, key: Hashable, without_tokens: int) -> None:
        """Remember a tail, and what its first user would hit without it."""
        self._without_tokens[key] = without_tokens
        if len(self._without_tokens) > self._max_tails:
            self._without_tokens.popitem(last=False)

    def take(self, key: Hashable) -> int | None:
        """Return what a tail's first user would hit without it, once.

        None: no such tail is known, or somebody has hit it before.
        """
        return self._without_tokens.pop(key, None)


class PartingRates:
    """How often, and how far from a prompt's end, its next sibling parts from it.

    Prompts are told apart by one thing, how much they add to what was stored before
    (by powers of two): a new document is another matter than the tenth question
    about it. A kind of prompt of which little has been seen is taken for what all
    prompts are. What was learned fades with the prompts that come after it.

    Attributes:
        distances: Upper ends of the distances that are told apart, in blocks.
    """

    def __init__(self, block_tokens: int) -> None:
        self.distances = ladder(_STEPS_PER_OCTAVE)
        self._distances_list: list[int] = self.distances.tolist()
        self._block_tokens = block_tokens
        self._sums_of_one = _sums_of_one(len(self.distances))
        sums_shape = self._sums_of_one.shape[1:]
        # Of each kind, and of all kinds together.
        self._sums = np.zeros((_NUM_KINDS, *sums_shape))
        self._all_sums = np.zeros(sums_shape)
        self._num_prompts = np.zeros(_NUM_KINDS)
        self._num_all_prompts = 0.0
        self._num_until_decay = _PROMPTS_PER_DECAY
        self._within: dict[int, np.ndarray] = {}

    def add_prompt(self, num_added_tokens: int) -> None:
        """Count a prompt that is about to be stored."""
        self._num_prompts[self._kind(num_added_tokens)] += 1
        self._num_all_prompts += 1
        self._num_until_decay -= 1
        if not self._num_until_decay:
            self._num_until_decay = _PROMPTS_PER_DECAY
            self._decay()

    def add_sibling(self, distance_tokens: int, num_added_tokens: int) -> None:
        """Count a sibling that no tail served in full but one that was predicted.

        Args:
            distance_tokens: From the end of the prompt that it shares with down to
                the position that it could have resumed at.
            num_added_tokens: What that prompt had added.
        """
        index = self.num_distances_below(distance_tokens / self._block_tokens)
        if index < len(self.distances):
            self._sums[self._kind(num_added_tokens)] += self._sums_of_one[index]
            self._all_sums += self._sums_of_one[index]
        self._within.clear()

    def num_distances_below(self, num_blocks: float) -> int:
        """Return how many distances are shorter."""
        return bisect_left(self._distances_list, num_blocks)

    def siblings_within(self, num_added_tokens: int) -> np.ndarray:
        """Return how many siblings to expect of a kind of prompt, summed up.

        Entry ``i``: those that part at one of the ``i`` shortest distances.

        The fewer were seen, the more of them are expected further off than those: of
        one seen, half; of a hundred, one.
        """
        kind = self._kind(num_added_tokens)
        if kind not in self._within:
            pooled = _POOL_PROMPTS / (self._num_all_prompts + _PRIOR_PROMPTS)
            seen, moved_off = self._sums[kind] + pooled * self._all_sums
            unseen_share = 1 / (1 + self._all_sums.item(0, -1))
            num_prompts = self._num_prompts.item(kind) + _POOL_PROMPTS
            self._within[kind] = (seen + unseen_share * moved_off) / num_prompts
        return self._within[kind]

    def _kind(self, num_added_tokens: int) -> int:
        num_blocks = max(num_added_tokens, 0) // self._block_tokens
        return min(num_blocks.bit_length(), _NUM_KINDS - 1)

    def _decay(self) -> None:
        faded = FADE**_PROMPTS_PER_DECAY
        self._sums *= faded
        self._all_sums *= faded
        self._num_prompts *= faded
        self._num_all_prompts *= faded
        self._within.clear()

# SPDX-License-Identifier: Apache-2.0
"""What clients send, drawn from a seed: prompts over random prefix trees."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

# Prompts of a forest use these token ids, special ones left out.
_FIRST_TOKEN, _LAST_TOKEN = 100, 999
# Requests after which the oldest tree is replaced by a new one.
_REQUESTS_PER_TREE = 40
_LIVE_TREES = 3
_REMEMBERED = 12


@dataclass(frozen=True)
class Job:
    """One request of a client.

    Attributes:
        prompt: Token ids.
        max_tokens: Tokens to generate, exactly.
        instance: Index of the instance to send it to.
        abort_after_seconds: When to close the connection; None: never.
        check: Whether to compare the answer with a cold one.
    """

    prompt: list[int]
    max_tokens: int
    instance: int
    abort_after_seconds: float | None
    check: bool


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Return ``count`` random token ids."""
    return [rng.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]


class PrefixTree:
    """Prefixes that branch: a trunk, two to four limbs, two to three twigs each.

    Lengths are random, so that branches part inside blocks and on their borders.
    """

    def __init__(self, seed: str) -> None:
        rng = random.Random(seed)
        trunk = random_tokens(rng, rng.randint(64, 900))
        self.prefixes: list[list[int]] = []
        for _ in range(rng.randint(2, 4)):
            limb = trunk + random_tokens(rng, rng.randint(1, 400))
            self.prefixes.append(limb)
            self.prefixes += [
                limb + random_tokens(rng, rng.randint(1, 250))
                for _ in range(rng.randint(2, 3))
            ]


class Forest:
    """The trees that are in use; all clients of a run share them."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_requests = 0
        self._trees = deque(self._tree(index) for index in range(_LIVE_TREES))

    def _tree(self, index: int) -> PrefixTree:
        return PrefixTree(f"{self._seed}/tree/{index}")

    def prefix(self, rng: random.Random) -> list[int]:
        """Return a random prefix, and let trees age."""
        self._num_requests += 1
        if self._num_requests % _REQUESTS_PER_TREE == 0:
            self._trees.popleft()
            newest = self._num_requests // _REQUESTS_PER_TREE + _LIVE_TREES - 1
            self._trees.append(self._tree(newest))
        return rng.choice(rng.choice(self._trees).prefixes)


def jobs(forest: Forest, seed: str, num_instances: int) -> Iterator[Job]:
    """Yield one client's requests, without end.

    Most are siblings (a prefix of the forest and an ending of their own); some are
    replays of an earlier prompt, some an earlier prompt with a next turn.
    """
    rng = random.Random(seed)
    earlier: deque[list[int]] = deque(maxlen=_REMEMBERED)
    while True:
        kind = rng.random()
        if earlier and kind < 0.15:
            prompt = rng.choice(earlier)
        elif earlier and kind < 0.25:
            prompt = rng.choice(earlier) + random_tokens(rng, rng.randint(8, 120))
        else:
            prompt = forest.prefix(rng) + random_tokens(rng, rng.randint(1, 220))
        # Next turns of next turns must not outgrow the model.
        if len(prompt) < 2000:
            earlier.append(prompt)
        aborts = rng.random() < 0.15
        yield Job(
            prompt=prompt,
            max_tokens=rng.choice((1, 4, 12, 40, 90)),
            instance=rng.randrange(num_instances),
            abort_after_seconds=rng.uniform(0.0, 2.0) if aborts else None,
            check=not aborts and rng.random() < 0.3,
        )

# SPDX-License-Identifier: Apache-2.0
"""Made-up traffic: what documents, chats and agents send, and no sharing at all.

Lengths and gaps are drawn from wide distributions and are nobody's measurements; they
show what a policy does with a *kind* of sharing, where traces show how much of it
there is. The same seed makes the same prompts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from vllm.junctions.plan.prompts import Prompt

TRACE_BLOCK_TOKENS = 512

# A piece of text: its number and its tokens. The same number is the same text, of
# which a prompt may use the first tokens only.
Piece = tuple[int, int]


@dataclass
class Writer:
    """Draws lengths and times, and numbers new pieces of text."""

    rng: np.random.Generator
    num_pieces: int = 0

    def piece(self, low_tokens: int, high_tokens: int) -> Piece:
        """Return a new piece; short ones are as common as long ones, by magnitude."""
        self.num_pieces += 1
        low, high = np.log(low_tokens), np.log(high_tokens)
        return self.num_pieces, round(float(np.exp(self.rng.uniform(low, high))))

    def pause(self, mean_seconds: float) -> float:
        return float(self.rng.exponential(mean_seconds))

    def start(self) -> float:
        """Return when a conversation of an hour's traffic begins, in seconds."""
        return float(self.rng.uniform(0, 3600))


# When a prompt arrives, in seconds, and what it is made of.
Arrival = tuple[float, list[Piece]]


def documents(writer: Writer, num_prompts: int) -> Iterator[Arrival]:
    """Documents of 2,000 to 60,000 tokens, each with one to three questions."""
    made = 0
    while made < num_prompts:
        document, time = writer.piece(2_000, 60_000), writer.start()
        for _ in range(int(writer.rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2]))):
            yield time, [document, writer.piece(20, 600)]
            time += writer.pause(120)
            made += 1


def chats(writer: Writer, num_prompts: int) -> Iterator[Arrival]:
    """Chats behind one of four system prompts; each turn sends the whole history."""
    systems = [writer.piece(300, 3_000) for _ in range(4)]
    made = 0
    while made < num_prompts:
        history, time = [systems[writer.rng.integers(4)]], writer.start()
        for _ in range(int(writer.rng.geometric(0.25))):
            history = [*history, writer.piece(20, 2_000)]
            yield time, history
            history = [*history, writer.piece(50, 1_000)]
            time += writer.pause(60)
            made += 1


def branching_chats(writer: Writer, num_prompts: int) -> Iterator[Arrival]:
    """Long chats in which every fourth turn goes back to an earlier one."""
    made = 0
    while made < num_prompts:
        turns, time = [writer.piece(200, 4_000)], writer.start()
        for _ in range(int(writer.rng.geometric(0.15))):
            if writer.rng.random() < 0.25:
                turns = turns[: int(writer.rng.integers(1, len(turns) + 1))]
            turns = [*turns, writer.piece(20, 8_000)]
            yield time, turns
            turns = [*turns, writer.piece(50, 2_000)]
            time += writer.pause(60)
            made += 1


def agents(writer: Writer, num_prompts: int) -> Iterator[Arrival]:
    """Agents with long tool descriptions that append what their tools return."""
    yield from _agents(writer, num_prompts, is_edited=False)


def editing_agents(writer: Writer, num_prompts: int) -> Iterator[Arrival]:
    """Agents that write the end of their context anew at each step."""
    yield from _agents(writer, num_prompts, is_edited=True)


def _agents(writer: Writer, num_prompts: int, is_edited: bool) -> Iterator[Arrival]:
    tools = [writer.piece(4_000, 12_000) for _ in range(3)]
    made = 0
    while made < num_prompts:
        history = [tools[writer.rng.integers(3)], writer.piece(50, 2_000)]
        time = writer.start()
        for _ in range(int(writer.rng.integers(2, 12))):
            yield time, [*history, *([writer.piece(300, 1_200)] * is_edited)]
            history = [*history, writer.piece(100, 4_000)]
            time += writer.pause(20)
            made += 1


def tool_calls(writer: Writer, num_prompts: int) -> Iterator[Arrival]:
    """Single calls behind one of twelve long instructions, a few of them repeated."""
    instructions = [writer.piece(1_000, 12_000) for _ in range(12)]
    weights = 1 / np.arange(1, 13)
    for _ in range(num_prompts):
        chosen = int(writer.rng.choice(12, p=weights / weights.sum()))
        prompt = [instructions[chosen], writer.piece(100, 8_000)]
        time = writer.start()
        yield time, prompt
        if writer.rng.random() < 0.1:
            yield time + writer.pause(60), [*prompt[:-1], (prompt[-1][0], 64)]


def unrelated(writer: Writer, num_prompts: int) -> Iterator[Arrival]:
    """Prompts that have nothing in common."""
    for _ in range(num_prompts):
        yield writer.start(), [writer.piece(500, 60_000)]


def mixture(writer: Writer, num_prompts: int) -> Iterator[Arrival]:
    """All of the above, in equal parts."""
    kinds = [kind for name, kind in TRAFFIC.items() if name != "mixture"]
    for kind in kinds:
        yield from kind(writer, num_prompts // len(kinds))


TRAFFIC: dict[str, Callable[[Writer, int], Iterator[Arrival]]] = {
    "documents": documents,
    "chats": chats,
    "branching-chats": branching_chats,
    "agents": agents,
    "editing-agents": editing_agents,
    "tool-calls": tool_calls,
    "unrelated": unrelated,
    "mixture": mixture,
}


def make_traffic(
    kind: str, hash_tokens: int, num_prompts: int = 3000, seed: int = 0
) -> list[Prompt]:
    """Return about ``num_prompts`` prompts of a kind, in order of arrival.

    Args:
        kind: A key of :data:`TRAFFIC`.
        hash_tokens: Tokens per hash unit; a divisor of 512.
        num_prompts: How many, but for the last conversation's rest.
        seed: Of all that is random.
    """
    writer = Writer(np.random.default_rng(seed))
    arrivals = sorted(
        TRAFFIC[kind](writer, num_prompts), key=lambda arrival: arrival[0]
    )
    return number_texts([pieces for _, pieces in arrivals], hash_tokens)


def number_texts(texts: list[list[Piece]], hash_tokens: int) -> list[Prompt]:
    """Number the hash units of prompts that are made of pieces.

    Two prompts have the same number for a unit where they are the same up to its end.
    Within a block of 512 tokens a prompt is compared with the latest one that came as
    far as that block and began it in the same way, so that of more than two ways to
    part in one block some may be taken to part earlier than they do.

    Args:
        texts: Pieces of each prompt.
        hash_tokens: Tokens per hash unit; a divisor of 512.
    """
    numbers = _Numbers(TRACE_BLOCK_TOKENS // hash_tokens)
    prompts = []
    for pieces in texts:
        num_tokens = sum(tokens for _, tokens in pieces)
        units = numbers.units(_contents(pieces, hash_tokens))
        prompts.append(
            Prompt(
                num_tokens,
                units[: num_tokens // hash_tokens].astype(np.uint64),
                pieces[0][0],
            )
        )
    return prompts


def _contents(pieces: list[Piece], hash_tokens: int) -> np.ndarray:
    """Return what each unit ends with: which piece, and how much of it."""
    ends = np.cumsum([tokens for _, tokens in pieces])
    num_units = -(-int(ends[-1]) // hash_tokens)
    unit_ends = np.minimum(np.arange(1, num_units + 1) * hash_tokens, ends[-1])
    index = np.searchsorted(ends, unit_ends)
    starts = np.concatenate([[0], ends[:-1]])
    numbers = np.array([number for number, _ in pieces])
    return (numbers[index] << 32) + unit_ends - starts[index]


class _Numbers:
    """Blocks of 512 tokens, and the numbers of their units."""

    def __init__(self, units_per_block: int) -> None:
        self.num_blocks = 0
        self._units_per_block = units_per_block
        self._known: dict[tuple[int, bytes], tuple[int, np.ndarray]] = {}
        self._latest: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def units(self, contents: np.ndarray) -> np.ndarray:
        parent, found = -1, []
        for start in range(0, len(contents), self._units_per_block):
            content = contents[start : start + self._units_per_block]
            parent, units = self._block(parent, content)
            found.append(units)
        return np.concatenate(found)

    def _block(self, parent: int, content: np.ndarray) -> tuple[int, np.ndarray]:
        key = (parent, content.tobytes())
        if key not in self._known:
            first = self.num_blocks * self._units_per_block
            units = first + np.arange(len(content))
            earlier = self._latest.get((parent, int(content[0])))
            if earlier is not None:
                num_both = min(len(content), len(earlier[0]))
                same = content[:num_both] == earlier[0][:num_both]
                num_same = num_both if same.all() else int(np.argmin(same))
                units[:num_same] = earlier[1][:num_same]
            self._known[key] = (self.num_blocks, units)
            self.num_blocks += 1
        number, units = self._known[key]
        self._latest[(parent, int(content[0]))] = (content, units)
        return number, units

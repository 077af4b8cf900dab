# SPDX-License-Identifier: Apache-2.0
"""Whether prompts share enough to hit."""

from collections.abc import Iterator, Sequence

import msgspec

from vllm.junctions.doctor.findings import Finding, fail, ok, warn
from vllm.junctions.doctor.reading import ServerMetrics, get


def check_prompts(
    servers: Sequence[ServerMetrics], files: Sequence[str]
) -> Iterator[Finding]:
    """Say how much of a prefix prompts share, in tokens and in blocks.

    A prompt counts as well off if any other of them shares a block with it.
    """
    subject = "prompts"
    if len(files) < 2:
        yield warn(subject, "one alone shares nothing", "give --prompt a second one")
        return
    try:
        tokens = [_tokens(servers[0], file) for file in files]
    except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
        yield fail(
            subject,
            f"cannot be read or tokenized ({error})",
            "give text, or a JSON list of token ids; text needs a server with a "
            "tokenizer",
        )
        return
    # What each shares with the one that shares most with it.
    shared = [
        max(_num_shared(ids, other) for other in tokens if other is not ids)
        for ids in tokens
    ]
    told = [server for server in servers if server.info]
    if not told:
        yield warn(
            subject,
            f"they share {min(shared)} tokens; no server tells its scheduler block",
            "ask again when a server with junctions has had a request",
        )
        return
    yield from _check_shared(subject, files, shared, int(told[0].info["block_tokens"]))


def _check_shared(
    subject: str, files: Sequence[str], shared: Sequence[int], block: int
) -> Iterator[Finding]:
    """Yield whether what prompts share can hit.

    Args:
        subject: What the findings are about.
        files: The prompts.
        shared: What each shares with the one that shares most with it, in tokens.
        block: Tokens per scheduler block.
    """
    mend = "put what they share first, and make it longer"
    if max(shared) < block:
        yield fail(
            subject,
            f"they share {max(shared)} tokens, less than one scheduler block of "
            f"{block}: they cannot hit",
            mend,
        )
        return
    for file, number in zip(files, shared, strict=True):
        if number < block:
            yield fail(
                subject,
                f"{file} shares {number} tokens with the others, less than one "
                f"scheduler block of {block}: it cannot hit",
                mend,
            )
    least = min(number for number in shared if number >= block)
    yield ok(
        subject,
        f"they share {least} tokens; at most {least // block * block} can hit "
        "(with EAGLE or MTP a block less)",
    )


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the prefix that two lists of tokens share."""
    pairs = zip(one, other, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b),
        min(len(one), len(other)),
    )


def _tokens(server: ServerMetrics, file: str) -> list[int]:
    with open(file, "rb") as opened:
        content = opened.read()
    if content.lstrip().startswith(b"["):
        return msgspec.json.decode(content, type=list[int])
    body = {"model": server.model_name, "prompt": content.decode()}
    answer = get(f"{server.base_url.rstrip('/')}/tokenize", msgspec.json.encode(body))
    tokens: list[int] = msgspec.json.decode(answer)["tokens"]
    return tokens

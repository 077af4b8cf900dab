# SPDX-License-Identifier: Apache-2.0
"""Hooks are per process, engines are not: which objects of vLLM take part.

A hook asks :func:`is_on` for the object that it was called on. Only an engine that
selected our connector has such objects; every other engine of the process runs the
original.
"""

from collections.abc import Iterable
from typing import Any

_ATTRIBUTE = "_vllm_junctions_on"


def switch_on(owner: Any, names: Iterable[str]) -> None:
    """Let hooks of these names act on ``owner``.

    Args:
        owner: A scheduler's cache manager, or a part of the store connector.
        names: Names of hooks' switches; added to those that are on.
    """
    setattr(owner, _ATTRIBUTE, getattr(owner, _ATTRIBUTE, frozenset()) | set(names))


def is_on(owner: Any, name: str) -> bool:
    """Return whether hooks of this name act on ``owner``."""
    return name in getattr(owner, _ATTRIBUTE, ())

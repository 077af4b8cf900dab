# SPDX-License-Identifier: Apache-2.0
"""``Request``: several junctions where vLLM keeps one scalar.

The scheduler assigns ``request.shared_prefix_boundary`` at each local lookup. With
the hooks on, that assignment sets the *local* part; a finished store lookup sets
the *store* part; ``request.shared_prefix_boundaries`` is their union. The scalar
reads as it was assigned, for everyone else who uses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.junctions.rules.boundaries import merge_boundaries
from vllm.junctions.seams.registry import Hook

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Kept in the instance's own dictionary under vLLM's name, so that an instance
# stays usable when the hooks go.
_SCALAR = "shared_prefix_boundary"
_LOCAL = "_junctions_local"
_STORE = "_junctions_store"
_UNION = "_junctions"
_FOCUS = "_junctions_focus"


class LocalJunction(int):
    """The scalar boundary of a local lookup, with all positions it stands for.

    ``KVCacheManager.get_computed_blocks`` returns one number and the scheduler
    assigns it to the request; the positions travel with that number.
    """

    boundaries: tuple[int, ...]

    def __new__(cls, scalar: int, boundaries: tuple[int, ...]) -> "LocalJunction":
        """Create the number ``scalar`` that carries ``boundaries``."""
        instance = super().__new__(cls, scalar)
        instance.boundaries = boundaries
        return instance


def _get_scalar(request: "Request") -> int:
    state = request.__dict__
    return state.get(_FOCUS, state.get(_SCALAR, 0))


def _set_scalar(request: "Request", value: int) -> None:
    state = request.__dict__
    state[_SCALAR] = int(value)
    if isinstance(value, LocalJunction):
        local = value.boundaries
    else:
        local = (int(value),) if value else ()
    _set_part(state, _LOCAL, local)


def _set_part(state: dict[str, Any], part: str, positions: tuple[int, ...]) -> None:
    # Read on every step of every request, so the union is made when it changes.
    state[part] = positions
    state[_UNION] = merge_boundaries(state.get(_LOCAL, ()), state.get(_STORE, ()))


def shared_prefix_boundaries(request: "Request") -> tuple[int, ...]:
    """Return a request's junctions, local and store, ascending and distinct.

    A request whose local lookup found 3840 and whose store lookup found
    ``(3584, 3840)`` gives ``(3584, 3840)``.
    """
    return request.__dict__.get(_UNION, ())


def junctions_by_source(
    request: "Request",
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a request's junctions as (found locally, reported by the store)."""
    state = request.__dict__
    return state.get(_LOCAL, ()), state.get(_STORE, ())


def set_store_junctions(request: "Request", junctions: tuple[int, ...]) -> None:
    """Replace the junctions that a store lookup reported for ``request``.

    The local part stays. Call it before the request's tokens are computed: cache
    managers decide what to keep as blocks fill.

    Args:
        request: The request whose lookup finished.
        junctions: Token positions, ascending.
    """
    _set_part(request.__dict__, _STORE, junctions)


@contextmanager
def focused(request: "Request", position: int) -> Iterator[None]:
    """Let vLLM's single-junction code see ``position`` as the scalar boundary.

    Args:
        request: The request to look at.
        position: One of its junctions, or 0 for none.
    """
    state = request.__dict__
    state[_FOCUS] = position
    try:
        yield
    finally:
        del state[_FOCUS]


def _scalar_property(_original: Any) -> property:
    return property(_get_scalar, _set_scalar)


class _BoundariesProperty(property):
    # Tells our attribute from one that vLLM may bring some day.
    from_vllm_junctions = True


def _boundaries_property(_original: Any) -> property:
    return _BoundariesProperty(shared_prefix_boundaries)


HOOKS = (
    Hook(
        target="vllm.v1.request:Request.shared_prefix_boundary",
        parameters=None,
        why=(
            "The scheduler assigns the local junction again on every retry and on "
            "the diverged-hit path, which would forget the store's."
        ),
        how=(
            "A property over the instance's own attribute: assignments set the "
            "local part, reads give what was assigned."
        ),
        remove_when="vLLM keeps several shared-prefix boundaries per request.",
        guarded_by="tests/unit/core/test_request.py",
        replace=_scalar_property,
    ),
    Hook(
        target="vllm.v1.request:Request.shared_prefix_boundaries",
        parameters=None,
        why="Local and store junctions together, for cache managers and saves.",
        how="A read-only property: the union of both parts.",
        remove_when="vLLM keeps several shared-prefix boundaries per request.",
        guarded_by="tests/unit/core/test_request.py",
        replace=_boundaries_property,
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""``Request``: several junctions beside vLLM's one scalar.

Each source of junctions sets its own part; ``request.shared_prefix_boundaries`` is
their union. The scalar ``request.shared_prefix_boundary`` stays vLLM's: it is what
the local lookup assigned, for everyone who reads it.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.junctions.rules.boundaries import chunk_stops, merge_boundaries
from vllm.junctions.seams.registry import Hook

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Where a request keeps its parts: in its own dictionary, so that an instance stays
# usable when the hooks go.
_KEY = "_junctions"
_NAME = "shared_prefix_boundaries"
# Where a vLLM with several boundaries takes those of a connector, if apart.
_NATIVE_EXTERNAL = "external_prefix_boundaries"


@dataclass(frozen=True)
class RequestJunctions:
    """A request's junctions by source: ascending token positions.

    Attributes:
        local: Derived at the last local lookup.
        store: Reported by the last finished store lookup.
        declared: Where the client says that siblings part.
        predicted: Where the first sibling is expected to part.
        union: All of them, distinct.
    """

    local: tuple[int, ...] = ()
    store: tuple[int, ...] = ()
    declared: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()
    union: tuple[int, ...] = ()


_NONE = RequestJunctions()


def junctions_of(request: "Request") -> RequestJunctions:
    """Return a request's junctions by source."""
    found: RequestJunctions = request.__dict__.get(_KEY, _NONE)
    return found


def shared_prefix_boundaries(request: "Request") -> tuple[int, ...]:
    """Return a request's junctions of all sources, ascending and distinct.

    A request whose local lookup found 3840 and whose store lookup found
    ``(3584, 3840)`` gives ``(3584, 3840)``.
    """
    known = junctions_of(request)
    found = known.union
    if known.local and not request.shared_prefix_boundary:
        # The scheduler did not take the local lookup's junction.
        found = merge_boundaries(known.store, known.declared, known.predicted)
    if _is_native(request):
        return merge_boundaries(found, getattr(request, _NAME))
    return found


def set_junctions(
    request: "Request",
    *,
    local: tuple[int, ...] | None = None,
    store: tuple[int, ...] | None = None,
    declared: tuple[int, ...] | None = None,
    predicted: tuple[int, ...] | None = None,
) -> None:
    """Replace parts of a request's junctions; the others stay.

    Call it before the request's tokens are computed: cache managers decide what to
    keep as blocks fill.

    Args:
        request: The request.
        local: What the local lookup found; None leaves it as it is.
        store: What the store lookup reported, likewise.
        declared: What the client declared, likewise.
        predicted: What was predicted, likewise.
    """
    known = junctions_of(request)
    before = (known.local, known.store, known.declared, known.predicted)
    parts = (
        known.local if local is None else local,
        known.store if store is None else store,
        known.declared if declared is None else declared,
        known.predicted if predicted is None else predicted,
    )
    if parts != before:
        # Read on every step of every request, so the union is made when it changes.
        request.__dict__[_KEY] = RequestJunctions(*parts, merge_boundaries(*parts))
    if _is_native(request):
        _give_to_native(request, merge_boundaries(*parts[1:]))


def found_boundaries(request: "Request") -> tuple[int, ...]:
    """Return the junctions that a request's lookups found, ascending and distinct."""
    known = junctions_of(request)
    local = known.local if request.shared_prefix_boundary else ()
    return merge_boundaries(local, known.store)


def stops_of(request: "Request", may_stop: Callable[[int], bool]) -> tuple[int, ...]:
    """Return where prefill chunks of a Mamba model stop for junctions, ascending.

    vLLM's own stop is one of them. See
    :func:`~vllm.junctions.rules.boundaries.chunk_stops`.

    Args:
        request: The request.
        may_stop: Whether a chunk may end at a position of ours. For all junctions
            that lookups found the lowest one decides.
    """
    known, found = junctions_of(request), found_boundaries(request)
    return chunk_stops(
        request.shared_prefix_boundary,
        found if found and may_stop(found[0]) else (),
        tuple(filter(may_stop, known.declared)),
        tuple(filter(may_stop, known.predicted)),
    )


def with_scalar(request: "Request", position: int) -> "Request":
    """Return the request as vLLM would have it with one junction at ``position``.

    For code of vLLM that reads the scalar. A shallow copy: whoever gets it may read
    the request and change what it refers to, but not its numbers.

    Args:
        request: The request to copy.
        position: One of its junctions, or 0 for none.
    """
    other = copy.copy(request)
    other.shared_prefix_boundary = position
    return other


def _is_native(request: "Request") -> bool:
    """Whether the running vLLM keeps several boundaries a request itself."""
    found = getattr(type(request), _NAME, None)
    return found is not None and not isinstance(found, _BoundariesProperty)


def _give_to_native(request: "Request", junctions: tuple[int, ...]) -> None:
    if hasattr(request, _NATIVE_EXTERNAL):
        setattr(request, _NATIVE_EXTERNAL, junctions)
    else:
        known = getattr(request, _NAME)
        setattr(request, _NAME, merge_boundaries(known, junctions))


class _BoundariesProperty(property):
    # Tells our attribute from one that vLLM may bring some day.
    from_vllm_junctions = True


def _boundaries_property(_original: Any) -> property:
    return _BoundariesProperty(shared_prefix_boundaries)


HOOKS = (
    Hook(
        target="vllm.v1.request:Request.shared_prefix_boundaries",
        parameters=None,
        why="Local and store junctions together, for cache managers and saves.",
        how="A read-only property: the union of all parts.",
        remove_when="vLLM keeps several shared-prefix boundaries per request.",
        guarded_by="tests/unit/core/test_request.py",
        replace=_boundaries_property,
    ),
)

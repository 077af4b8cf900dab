# SPDX-License-Identifier: Apache-2.0
"""What the scheduler hands to the workers for a save, with junctions."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta

from vllm.junctions.rules.boundaries import merge_boundaries


@dataclass
class JunctionReqMeta(ReqMeta):
    """A store job that also names the request's junctions.

    Attributes:
        shared_prefix_boundaries: Token positions whose tails this job saves on top
            of the request's replay tails, ascending.
        declared: Those of them that the client declared.
        predicted: Those of them that were predicted.
    """

    shared_prefix_boundaries: tuple[int, ...] = ()
    declared: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        req_meta: ReqMeta,
        shared_prefix_boundaries: tuple[int, ...],
        declared: tuple[int, ...] = (),
        predicted: tuple[int, ...] = (),
    ) -> "JunctionReqMeta":
        """Return ``req_meta`` with junctions added; every other field as it was."""
        stock = {field.name: getattr(req_meta, field.name) for field in fields(ReqMeta)}
        return cls(
            **stock,
            shared_prefix_boundaries=shared_prefix_boundaries,
            declared=declared,
            predicted=predicted,
        )


class JunctionTracker:
    """Every junction that a request has had, until the request ends.

    A request's own tuple is derived again when it resumes after preemption, and a
    hit on what it cached before leaves nothing to derive; its unsaved tails are
    still wanted in the store. The stock ``RequestTracker`` is made anew on resume
    and cannot remember them.
    """

    def __init__(self) -> None:
        self._boundaries_by_request: dict[str, tuple[int, ...]] = {}

    def add(self, req_id: str, boundaries: tuple[int, ...]) -> None:
        """Remember ``boundaries`` (ascending token positions) for a request."""
        if boundaries:
            self._boundaries_by_request[req_id] = merge_boundaries(
                self.get(req_id), boundaries
            )

    def get(self, req_id: str) -> tuple[int, ...]:
        """Return all positions remembered for a request, ascending."""
        return self._boundaries_by_request.get(req_id, ())

    def discard(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for req_id in req_ids:
            self._boundaries_by_request.pop(req_id, None)

    def __len__(self) -> int:
        return len(self._boundaries_by_request)

# SPDX-License-Identifier: Apache-2.0
"""The hooks into vLLM's core as data, and how they go on and off together."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.junctions.seams import compat

_ABSENT = object()


@dataclass(frozen=True)
class Hook:
    """One change to vLLM's core.

    Attributes:
        target: ``module:qualified.name`` that is replaced or added.
        parameters: Parameters of the original that the replacement relies on, in
            order, without ``self``. None where the target is no callable of
            vLLM's but an attribute that we add.
        why: What goes wrong without it.
        how: What the replacement does; every one of them calls the original.
        remove_when: What has to change in vLLM before the hook can go.
        guarded_by: The test that fails without the hook.
        replace: Gets the original (None for an added attribute), returns what
            takes its place.
    """

    target: str
    parameters: tuple[str, ...] | None
    why: str
    how: str
    remove_when: str
    guarded_by: str
    replace: Callable[[Any], Any]


class HookSet:
    """Hooks that are applied all together or not at all.

    ``install`` and ``uninstall`` are idempotent and safe to call from several
    threads of one process.
    """

    def __init__(self, hooks: tuple[Hook, ...]) -> None:
        self.hooks = hooks
        self._lock = threading.Lock()
        # (owner, name, original) in the order in which they were applied.
        self._applied: list[tuple[Any, str, Any]] = []

    @property
    def installed(self) -> tuple[str, ...]:
        """Targets that are replaced in this process right now."""
        if not self._applied:
            return ()
        return tuple(hook.target for hook in self.hooks)

    def check(self) -> None:
        """Check that every target is there with the expected signature.

        Raises:
            UnsupportedRuntimeError: Names the first target that does not fit.
        """
        compat.check_seams(
            compat.Seam(hook.target, hook.parameters)
            for hook in self.hooks
            if hook.parameters is not None
        )

    def install(self) -> None:
        """Apply all hooks; where one cannot be applied, none is.

        Raises:
            UnsupportedRuntimeError: See :meth:`check`.
        """
        with self._lock:
            if self._applied:
                return
            self.check()
            try:
                for hook in self.hooks:
                    self._apply(hook)
            except BaseException:
                self._revert()
                raise

    def uninstall(self) -> None:
        """Put every original back."""
        with self._lock:
            self._revert()

    def _apply(self, hook: Hook) -> None:
        if hook.parameters is not None:
            owner, name, original = compat.resolve(hook.target)
        else:
            owner_target, _, name = hook.target.rpartition(".")
            _, _, owner = compat.resolve(owner_target)
            original = owner.__dict__.get(name, _ABSENT)
        replacement = hook.replace(None if original is _ABSENT else original)
        setattr(owner, name, replacement)
        self._applied.append((owner, name, original))

    def _revert(self) -> None:
        while self._applied:
            owner, name, original = self._applied.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

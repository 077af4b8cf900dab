# SPDX-License-Identifier: Apache-2.0
"""Edit records: where in a file of vLLM, and what we put there.

A record carries no text of vLLM beyond its anchors, each the shortest that is unique
there. A region that gives way is named by its two ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_NEW_FILES = Path(__file__).parent / "new"
_SHOWN_CHARACTERS = 60


class AnchorError(Exception):
    """An anchor that does not fit: names the file, the anchor, what was found."""


@dataclass(frozen=True)
class Edit:
    """One place in one file.

    Attributes:
        path: File, relative to the tree.
        at: Anchor; the first one after ``within``.
        put: Our text.
        how: ``instead`` of the anchor (and of all up to ``until``), on lines of its
            own ``before`` or ``after`` the anchor's line, or ``everywhere`` in place
            of the anchor.
        within: Text, unique in the file, that the anchor follows; without it the
            anchor itself has to be unique.
        until: Where the region ends that gives way; goes with it.
        versions: Releases whose trees need this edit; empty: all.
    """

    path: str
    at: str
    put: str
    how: Literal["instead", "before", "after", "everywhere"] = "instead"
    within: str = ""
    until: str = ""
    versions: tuple[str, ...] = ()

    def apply(self, text: str) -> str:
        """Return ``text`` with this edit made.

        Raises:
            AnchorError: An anchor is missing, or not unique.
        """
        if self.how == "everywhere":
            self._require(self.at in text, self.at, "not there")
            return text.replace(self.at, self.put)
        start, end = self._region(text)
        if self.how == "instead":
            return text[:start] + self.put + text[end:]
        if self.how == "before":
            place = text.rfind("\n", 0, start) + 1
        else:
            place = text.find("\n", end) + 1
            self._require(place > 0, self.at, "on the last line, which has no end")
        return text[:place] + self.put + text[place:]

    def _region(self, text: str) -> tuple[int, int]:
        start = 0
        if self.within:
            start = self._only(text, self.within) + len(self.within)
            start = text.find(self.at, start)
            self._require(start >= 0, self.at, f"not there after {_shown(self.within)}")
        else:
            start = self._only(text, self.at)
        end = start + len(self.at)
        if self.until:
            until = text.find(self.until, end)
            self._require(until >= 0, self.until, f"not there after {_shown(self.at)}")
            end = until + len(self.until)
        return start, end

    def _only(self, text: str, anchor: str) -> int:
        count = text.count(anchor)
        found = "not there" if not count else f"{count} times there"
        self._require(count == 1, anchor, found)
        return text.index(anchor)

    def _require(self, fits: bool, anchor: str, found: str) -> None:
        if not fits:
            raise AnchorError(f"{self.path}: anchor {_shown(anchor)} is {found}")


def _shown(anchor: str) -> str:
    text = repr(anchor)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...'"


@dataclass(frozen=True)
class Commit:
    """One commit of the series.

    Attributes:
        name: What the repository calls it.
        message: Subject, empty line, body.
        edits: Made in this order.
        new_files: Files that it adds, by their place in the tree; their text lies
            below ``tools/series/new``.
        changed_tests: Ids of vLLM's own tests whose text it has to change.
    """

    name: str
    message: str
    edits: tuple[Edit, ...]
    new_files: tuple[str, ...] = ()
    changed_tests: tuple[str, ...] = ()
    versions: tuple[str, ...] = field(default=())

    def files(self, version: str) -> tuple[str, ...]:
        """Return the files that it edits in a tree of ``version``."""
        return tuple(dict.fromkeys(edit.path for edit in self.edits_for(version)))

    def edits_for(self, version: str) -> tuple[Edit, ...]:
        return tuple(e for e in self.edits if not e.versions or version in e.versions)

    def apply(self, texts: Mapping[str, str], version: str) -> dict[str, str]:
        """Return the texts of all files that this commit writes.

        Args:
            texts: Present text of every file that it edits.
            version: Release whose records fit the tree.

        Raises:
            AnchorError: See :meth:`Edit.apply`.
        """
        written: dict[str, str] = {}
        for edit in self.edits_for(version):
            text = written.get(edit.path, texts.get(edit.path))
            if text is None:
                raise AnchorError(f"{edit.path}: no such file in this tree")
            written[edit.path] = edit.apply(text)
        for path in self.new_files:
            written[path] = (_NEW_FILES / path).read_text()
        return written

# SPDX-License-Identifier: Apache-2.0
"""A tree of vLLM that the series is to be applied to: what it is, what forbids it."""

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

# The file that the first commit changes, and the name that only it brings.
_MARK = ("vllm/v1/request.py", "shared_prefix_boundaries")
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class Refused(Exception):
    """Why nothing was done: a sentence for the user. The tree is as it was."""


def require_tree(tree: Path) -> None:
    """Refuse what is no tree of vLLM, already has the series, or is read-only.

    Raises:
        Refused: With what to do about it, where there is something.
    """
    path, name = _MARK
    if not (tree / path).is_file():
        raise Refused(f"{tree} is no source tree of vLLM: it has no {path}")
    if name in (tree / path).read_text():
        raise Refused(
            f"{tree} already keeps several shared-prefix boundaries ({path}): "
            "there is nothing to apply"
        )


def require_writable(tree: Path, paths: Iterable[str]) -> None:
    """Refuse a tree in which one of the files could not be written.

    Raises:
        Refused: Names the folder or file.
    """
    places = [tree, tree / ".git"]
    for path in paths:
        places += [tree / path, (tree / path).parent]
    for place in places:
        if place.exists() and not _is_writable(place):
            raise Refused(f"{place} is read-only: nothing was changed")


def require_room(folder: Path) -> None:
    """Refuse a folder that could not be made, or written to.

    Raises:
        Refused: Names the place that forbids it.
    """
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if not place.is_dir():
        raise Refused(f"{place} is in the way of the folder for the patch files")
    if not _is_writable(place):
        raise Refused(f"{place} is read-only: the patch files have no place")


def _is_writable(place: Path) -> bool:
    # Root may write anywhere; a mode without any write bit is meant for root too.
    return bool(place.stat().st_mode & _WRITABLE) and os.access(place, os.W_OK)


def read(tree: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the text of each file that is there.

    Raises:
        Refused: A file has CRLF line ends, or is no UTF-8.
    """
    texts = {}
    for path in paths:
        if not (tree / path).is_file():
            continue
        content = (tree / path).read_bytes()
        if b"\r\n" in content:
            raise Refused(
                f"{tree / path} has CRLF line ends, the series has LF: check the tree "
                "out with core.autocrlf=false"
            )
        try:
            texts[path] = content.decode()
        except UnicodeDecodeError as error:
            raise Refused(f"{tree / path} is no UTF-8 text: {error}") from error
    return texts


def found_version(tree: Path) -> str | None:
    """Return the version that a tree says it is, or None where it does not say.

    A source package says so in ``PKG-INFO``, a built checkout in ``_version.py``.
    """
    for path, pattern in (
        ("PKG-INFO", r"^Version: (\S+)$"),
        ("vllm/_version.py", r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]"),
        ("vllm/_version.py", r"^__version__ = .*['\"]([^'\"]+)['\"]"),
    ):
        if (tree / path).is_file():
            found = re.search(pattern, (tree / path).read_text(), re.MULTILINE)
            if found:
                return found[1]
    return None


def unknown(version: str, known: tuple[str, ...]) -> Refused:
    """Return what to raise for a release that the series has no records for."""
    names = " and ".join(known)
    return Refused(f"there are no records for vLLM {version}, only for {names}")


def records_for(
    tree: Path, wanted: str | None, known: tuple[str, ...]
) -> tuple[str, str]:
    """Return which release's records fit a tree, and what the tree says it is.

    A release gets its own records. Anything else, such as a checkout between two
    releases, needs ``wanted``: anchors then decide whether it fits.

    Raises:
        Refused: The tree is a release that the series does not know, or not the one
            that was asked for; or it does not say, and nothing was asked for.
    """
    found = found_version(tree)
    names = " and ".join(known)
    if wanted is not None and wanted not in known:
        raise unknown(wanted, known)
    release = found.split("+")[0] if found else None
    if release in known:
        if wanted not in (None, release):
            raise Refused(f"{tree} is vLLM {release}, not {wanted}")
        return release, release
    is_release = release is not None and re.fullmatch(r"[\d.]+", release)
    if is_release:
        raise Refused(f"{tree} is vLLM {release}; there are records for {names} only")
    if wanted is None:
        raise Refused(
            f"{tree} is {release or 'a checkout that does not say which version'}: "
            f"choose the records to try with VERSION={known[-1]}"
        )
    return wanted, release or f"a checkout, with the records of {wanted}"

# SPDX-License-Identifier: Apache-2.0
"""From records to a branch of commits: all of them, or none."""

import hashlib
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.series import trees
from tools.series.edits import Commit
from tools.series.git import Git
from tools.series.records import NUM_REQUIRED, SERIES, VERSIONS
from tools.vllm_tree import CACHE
from tools.vllm_tree import tree as source_tree

PATCHES = CACHE.parent / "patches"


@dataclass(frozen=True)
class Applied:
    """A tree that has the series.

    Attributes:
        tree: Where it is.
        found: What the tree says it is.
        version: Release whose records were used.
        patches: ``git format-patch`` files, in order.
    """

    tree: Path
    found: str
    version: str
    patches: list[Path]


def chosen(without: Collection[str]) -> tuple[Commit, ...]:
    """Return the commits of the series but for those left out.

    Raises:
        Refused: A name is unknown, or one that the others stand on.
    """
    droppable = {commit.name for commit in SERIES[NUM_REQUIRED:]}
    for name in without:
        if name not in droppable:
            names = ", ".join(sorted(droppable))
            raise trees.Refused(f"{name!r} cannot be left out; these can: {names}")
    return tuple(commit for commit in SERIES if commit.name not in without)


def texts_by_commit(
    tree: Path, version: str, commits: Collection[Commit]
) -> list[tuple[Commit, dict[str, str]]]:
    """Return what each commit writes, without writing anything.

    Raises:
        Refused: A file cannot be read as the series needs it.
        AnchorError: An anchor does not fit.
    """
    paths = [path for commit in commits for path in commit.files(version)]
    texts: dict[str, str] = trees.read(tree, dict.fromkeys(paths))
    written = []
    for commit in commits:
        for path in commit.new_files:
            if path in texts or (tree / path).exists():
                raise trees.Refused(f"{tree / path} is there already")
        changed = commit.apply(texts, version)
        texts |= changed
        written.append((commit, changed))
    return written


def apply_to(
    tree: Path,
    wanted: str | None = None,
    without: Collection[str] = (),
    patches: Path = PATCHES,
) -> Applied:
    """Apply the series to ``tree`` as commits on a branch, and write patch files.

    A folder that is no checkout becomes one, of one commit, first.

    Args:
        tree: A source tree of vLLM.
        wanted: Release whose records to use where the tree is no release.
        without: Commits to leave out.
        patches: Where the patch files go, in a folder a version.

    Raises:
        Refused: The tree cannot take the series; nothing was changed.
        AnchorError: An anchor does not fit; nothing was changed.
    """
    commits = chosen(without)
    trees.require_tree(tree)
    version, found = trees.records_for(tree, wanted, VERSIONS)
    git = Git(tree)
    if git.is_repository:
        git.require_clean()
    written = texts_by_commit(tree, version, commits)
    trees.require_writable(tree, [path for _, texts in written for path in texts])
    trees.require_room(patches / version)
    files = _commit(git, f"vLLM {found}", written, patches / version)
    return Applied(tree, found, version, files)


def _commit(
    git: Git,
    release: str,
    written: list[tuple[Commit, dict[str, str]]],
    patches: Path,
) -> list[Path]:
    starts_here = not git.is_repository
    try:
        if starts_here:
            git.start_repository(release)
        base = git("rev-parse", "HEAD")
        messages: list[tuple[str, Mapping[str, str]]] = [
            (commit.message, texts) for commit, texts in written
        ]
        last = git.commit_all(messages)
        with tempfile.TemporaryDirectory() as made:
            git.write_patches(base, last, Path(made))
            git.switch_to(last)
            shutil.rmtree(patches, ignore_errors=True)
            shutil.copytree(made, patches)
    except trees.Refused:
        if starts_here and git.is_repository:
            git.end_repository()
        raise
    return sorted(patches.glob("*.patch"))


def patched_tree(version: str, without: Collection[str] = ()) -> Applied:
    """Return a patched copy of a release's source package below ``.cache/``.

    Made anew when the series has changed since.

    Raises:
        Refused: There are no records for ``version``.
        AnchorError: An anchor does not fit.
    """
    if version not in VERSIONS:
        raise trees.unknown(version, VERSIONS)
    tree = CACHE / f"patched-{version}"
    stamp = tree / ".series"
    state = _state(without)
    if stamp.exists() and stamp.read_text() == state:
        patches = sorted((PATCHES / version).glob("*.patch"))
        if patches:
            return Applied(tree, version, version, patches)
    shutil.rmtree(tree, ignore_errors=True)
    # A copy that shares nothing: the original may be hard-linked elsewhere.
    shutil.copytree(source_tree(version), tree, symlinks=True)
    applied = apply_to(tree, version, without)
    stamp.write_text(state)
    return applied


def _state(without: Collection[str]) -> str:
    digest = hashlib.sha256(repr(sorted(without)).encode())
    folder = Path(__file__).parent
    sources = [folder / name for name in ("edits.py", "git.py", "apply.py")]
    for part in ("records", "new"):
        sources += (folder / part).rglob("*.py")
    for path in sorted(sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()

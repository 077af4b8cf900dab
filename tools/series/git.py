# SPDX-License-Identifier: Apache-2.0
"""The series as git commits: built beside the working tree, then switched to."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.series.trees import Refused

BRANCH = "shared-prefix-junctions"
# Commits whose date is fixed: the same tree gives the same patches.
_IDENTITY = {
    "GIT_AUTHOR_NAME": "The vllm-junctions authors",
    "GIT_AUTHOR_EMAIL": "vllm-junctions@localhost",
    "GIT_COMMITTER_NAME": "The vllm-junctions authors",
    "GIT_COMMITTER_EMAIL": "vllm-junctions@localhost",
    "GIT_AUTHOR_DATE": "2026-12-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-12-01T00:00:00Z",
}


class Git:
    """Git in one tree, whatever repository lies around it."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def __call__(self, *arguments: str, stdin: str = "", index: Path | None = None):
        """Run git and return what it prints.

        Raises:
            Refused: With git's own words.
        """
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
            **_IDENTITY,
        }
        if index is not None:
            environment["GIT_INDEX_FILE"] = str(index)
        try:
            done = self._run(arguments, stdin, environment)
        except FileNotFoundError as error:
            raise Refused("git is not installed") from error
        if done.returncode:
            words = (done.stderr or done.stdout).strip().splitlines()
            raise Refused(f"git {arguments[0]} in {self.tree}: {' '.join(words)}")
        return done.stdout.strip()

    def _run(
        self, arguments: Sequence[str], stdin: str, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(
                    "git",
                    "-c",
                    "core.autocrlf=false",
                    "-c",
                    f"safe.directory={self.tree}",
                ),
                *("-c", "commit.gpgsign=false", "-C", str(self.tree), *arguments),
            ],
            input=stdin,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def is_repository(self) -> bool:
        """Whether the tree itself is a checkout, rather than a folder in another."""
        return (self.tree / ".git").exists()

    def require_clean(self) -> None:
        """Refuse a checkout with changes, or with our branch.

        Raises:
            Refused: Names the first changed file, or the branch.
        """
        changed = self("status", "--porcelain", "--untracked-files=no").splitlines()
        if changed:
            raise Refused(
                f"{self.tree} has changes that are not committed "
                f"({changed[0].split()[-1]}): commit or stash them first"
            )
        if self("branch", "--list", BRANCH):
            raise Refused(
                f"{self.tree} already has a branch {BRANCH}: rename or delete it first"
            )

    def start_repository(self, message: str) -> None:
        """Make a folder a repository with one commit of all that is in it."""
        self("init", "--quiet", "--initial-branch", "release")
        self("add", "--all")
        self("commit", "--quiet", "--no-verify", "--message", message)

    def end_repository(self) -> None:
        """Take back what :meth:`start_repository` did."""
        shutil.rmtree(self.tree / ".git")

    def commit_all(self, commits: Sequence[tuple[str, Mapping[str, str]]]) -> str:
        """Add commits behind HEAD without touching the working tree.

        Args:
            commits: Message and texts by path of each.

        Returns:
            The last commit's id.
        """
        with tempfile.TemporaryDirectory() as folder:
            index = Path(folder) / "index"
            parent = self("rev-parse", "HEAD")
            self("read-tree", parent, index=index)
            for message, texts in commits:
                for path, text in texts.items():
                    blob = self("hash-object", "-w", "--stdin", stdin=text)
                    known = self("ls-files", "--stage", "--", path, index=index)
                    entry = f"{known[:6] or '100644'},{blob},{path}"
                    self("update-index", "--add", "--cacheinfo", entry, index=index)
                tree = self("write-tree", index=index)
                parent = self("commit-tree", tree, "-p", parent, stdin=message)
        return parent

    def switch_to(self, commit: str) -> None:
        """Leave the tree on our branch, at ``commit``; or as it was.

        Raises:
            Refused: Git could not write the working tree.
        """
        # Makes the branch last of all, when the files are written.
        self("switch", "--quiet", "--create", BRANCH, commit)

    def write_patches(self, base: str, commit: str, folder: Path) -> None:
        """Write one ``git format-patch`` file a commit behind ``base``."""
        self(
            *("format-patch", "--quiet", "--zero-commit", "--no-signature"),
            *("--output-directory", str(folder), f"{base}..{commit}"),
        )

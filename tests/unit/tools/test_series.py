# SPDX-License-Identifier: Apache-2.0
"""The in-tree series: its records fit, and the tool changes all or nothing."""

import ast
import difflib
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.series import __main__ as patches
from tools.series.apply import texts_by_commit
from tools.series.edits import AnchorError, Edit
from tools.series.git import BRANCH
from tools.series.parts import parts
from tools.series.records import NUM_REQUIRED, SERIES, VERSIONS
from tools.vllm_tree import tree as source_tree

# Commits 1 to 3 may add so many lines, tests aside.
MAX_LINES_ADDED = 220
# Enough to be unique; more would be vLLM's text rather than a place in it.
MAX_ANCHOR_CHARACTERS = 70
# Characters a line, by vLLM's settings of ruff.
VLLM_WIDTH = 88
REQUEST = "vllm/v1/request.py"


def edited_files(version: str) -> list[str]:
    return sorted({path for commit in SERIES for path in commit.files(version)})


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source package with the files that matter, of the newest version."""
    return make_tree(tmp_path / "vllm-src", VERSIONS[-1])


def make_tree(folder: Path, version: str) -> Path:
    for name in ("PKG-INFO", *edited_files(version)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source_tree(version) / name, folder / name)
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    return subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def make_checkout(folder: Path) -> Path:
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "vLLM")
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    """Everything of a tree but git's unreachable objects and its index."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git/objects/" not in str(path) and path.name != "index"
    }


def run(tmp_path: Path, tree: Path, *arguments: str) -> int:
    where = ("--tree", str(tree), "--patches", str(tmp_path / "patches"))
    return patches.main([*where, *arguments])


# The records


def test_every_commit_fits_compiles_and_leaves_the_rest_alone(version: str) -> None:
    texts = {p: (source_tree(version) / p).read_text() for p in edited_files(version)}
    for commit in SERIES:
        written = commit.apply(texts, version)
        for path, text in written.items():
            ast.parse(text, path)
        assert set(written) == {*commit.files(version), *commit.new_files}
        texts |= written


def test_the_feature_is_small(version: str) -> None:
    texts = {p: (source_tree(version) / p).read_text() for p in edited_files(version)}
    num_added = 0
    for commit in SERIES[:NUM_REQUIRED]:
        written = commit.apply(texts, version)
        for path, text in written.items():
            if path.startswith("vllm/"):
                lines = difflib.ndiff(texts[path].splitlines(), text.splitlines())
                num_added += sum(line.startswith("+ ") for line in lines)
        texts |= written

    assert num_added <= MAX_LINES_ADDED


def test_lines_fit_vllms_width(version: str) -> None:
    texts = {p: (source_tree(version) / p).read_text() for p in edited_files(version)}
    too_long = []
    for commit in SERIES:
        written = commit.apply(texts, version)
        for path, text in written.items():
            there = set(texts.get(path, "").splitlines())
            ours = [line for line in text.splitlines() if line not in there]
            too_long += [
                (path, line)
                for line in ours
                if len(line) > VLLM_WIDTH and "noqa: E501" not in line
            ]
        texts |= written

    assert too_long == []


def all_edits() -> list[Edit]:
    return [edit for commit in SERIES for edit in commit.edits]


def test_anchors_are_short() -> None:
    anchors = [a for e in all_edits() for a in (e.at, e.within, e.until)]

    assert max(map(len, anchors)) <= MAX_ANCHOR_CHARACTERS


def test_what_we_put_is_not_what_was_there() -> None:
    """A longer line that the file had already is vLLM's text, not ours."""
    texts = {
        (edit.path, version): (source_tree(version) / edit.path).read_text()
        for edit in all_edits()
        for version in edit.versions or VERSIONS
    }
    for edit in all_edits():
        for version in edit.versions or VERSIONS:
            there = {line.strip() for line in texts[edit.path, version].splitlines()}
            ours = {line.strip() for line in edit.put.splitlines()}
            assert {line for line in ours & there if len(line) > 60} == set()


# What it leaves behind


def test_a_checkout_ends_on_a_branch_of_commits(tmp_path: Path, tree: Path) -> None:
    make_checkout(tree)

    assert run(tmp_path, tree) == 0

    assert git(tree, "branch", "--show-current") == BRANCH
    subjects = git(tree, "log", "--format=%s", "--reverse", f"main..{BRANCH}")
    assert subjects.splitlines() == [c.message.splitlines()[0] for c in SERIES]
    assert git(tree, "status", "--porcelain") == ""


def test_a_folder_that_is_no_checkout_becomes_one(tmp_path: Path, tree: Path) -> None:
    assert run(tmp_path, tree) == 0

    assert git(tree, "branch", "--show-current") == BRANCH
    assert git(tree, "log", "--format=%s", "release") == f"vLLM {VERSIONS[-1]}"


def test_git_am_takes_the_files(tmp_path: Path, version: str) -> None:
    applied = make_checkout(make_tree(tmp_path / "one", version))
    fresh = make_checkout(make_tree(tmp_path / "two", version))
    run(tmp_path, applied)

    files = sorted((tmp_path / "patches" / version).glob("*.patch"))
    git(fresh, "am", "--quiet", *map(str, files))

    assert len(files) == len(SERIES)
    assert git(fresh, "rev-parse", "HEAD^{tree}") == git(
        applied, "rev-parse", f"{BRANCH}^{{tree}}"
    )


def test_a_checkout_between_releases_takes_the_records_that_are_named(
    tmp_path: Path, tree: Path
) -> None:
    (tree / "PKG-INFO").unlink()
    make_checkout(tree)

    assert run(tmp_path, tree, "--version", VERSIONS[-1]) == 0


def test_a_droppable_commit_can_be_left_out(tmp_path: Path, version: str) -> None:
    for commit in SERIES[NUM_REQUIRED:]:
        tree = make_tree(tmp_path / commit.name, version)

        assert run(tmp_path, tree, "--without", commit.name) == 0
        assert commit.message.splitlines()[0] not in git(tree, "log", "--format=%s")


def test_every_part_fits(tmp_path: Path, version: str) -> None:
    """Each beginning, and the feature with each commit that can be left out."""
    for name, commits in parts().items():
        tree = make_tree(tmp_path / name, version)

        for commit, texts in texts_by_commit(tree, version, commits):
            for path, text in texts.items():
                compile(text, path, "exec")
            assert texts, commit.name


def test_parts_are_every_beginning_and_every_commit_alone() -> None:
    names = {tuple(commit.name for commit in part) for part in parts().values()}
    feature = tuple(commit.name for commit in SERIES[:NUM_REQUIRED])

    assert {name[-1] for name in names if len(name) <= NUM_REQUIRED} == {*feature}
    assert {name[-1:] for name in names if name[:-1] == feature} == {
        (commit.name,) for commit in SERIES[NUM_REQUIRED:]
    }


# Bad input: a sentence, exit status 1, nothing changed


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def refuse(tree: Path, *arguments: str) -> str:
        before = snapshot(tree)
        assert run(tmp_path, tree, *arguments) == 1
        assert snapshot(tree) == before
        assert not (tmp_path / "patches").exists()
        shown = capsys.readouterr()
        assert shown.out == ""
        assert len(shown.err.splitlines()) == 1
        return shown.err

    return refuse


def test_a_dirty_tree(tree: Path, refused) -> None:
    make_checkout(tree)
    with (tree / REQUEST).open("a") as file:
        file.write("# mine\n")

    assert f"not committed ({REQUEST})" in refused(tree)


def test_another_version(tree: Path, refused) -> None:
    text = (tree / "PKG-INFO").read_text()
    (tree / "PKG-INFO").write_text(
        text.replace(f"Version: {VERSIONS[-1]}", "Version: 0.31.0")
    )

    assert "is vLLM 0.31.0; there are records for" in refused(tree)


def test_a_release_that_is_not_the_one_asked_for(tree: Path, refused) -> None:
    words = refused(tree, "--version", VERSIONS[0])

    assert f"is vLLM {VERSIONS[-1]}, not {VERSIONS[0]}" in words


def test_records_that_do_not_exist(tree: Path, refused) -> None:
    assert "no records for vLLM 0.9.0" in refused(tree, "--version", "0.9.0")


def test_a_checkout_that_does_not_say_its_version(tree: Path, refused) -> None:
    (tree / "PKG-INFO").unlink()

    assert "VERSION=" in refused(tree)


def test_a_tree_that_has_the_series(
    tmp_path: Path, tree: Path, refused, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, tree)
    capsys.readouterr()
    shutil.rmtree(tmp_path / "patches")

    assert "already keeps several shared-prefix boundaries" in refused(tree)


def test_a_tree_that_has_our_branch(tree: Path, refused) -> None:
    make_checkout(tree)
    git(tree, "branch", BRANCH)

    assert f"already has a branch {BRANCH}" in refused(tree)


def test_a_file_with_crlf(tree: Path, refused) -> None:
    content = (tree / REQUEST).read_bytes()
    (tree / REQUEST).write_bytes(content.replace(b"\n", b"\r\n"))

    assert f"{REQUEST} has CRLF line ends" in refused(tree)


@pytest.mark.parametrize("place", ["", "vllm/v1/core", REQUEST])
def test_a_read_only_place(tree: Path, place: str, refused) -> None:
    mode = (tree / place).stat().st_mode
    (tree / place).chmod(mode & ~0o222)
    try:
        assert f"{tree / place} is read-only" in refused(tree)
    finally:
        (tree / place).chmod(mode)


def test_a_file_in_the_place_of_the_folder_for_the_patches(
    tmp_path: Path, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A way not to be able to write that holds for root too."""
    make_checkout(tree)
    before = snapshot(tree)
    (tmp_path / "patches").write_text("mine")

    assert run(tmp_path, tree) == 1

    words = capsys.readouterr().err
    assert f"{tmp_path / 'patches'} is in the way of the folder" in words
    assert len(words.splitlines()) == 1
    assert snapshot(tree) == before
    assert (tmp_path / "patches").read_text() == "mine"


def test_a_read_only_folder_for_the_patches(tmp_path: Path, tree: Path, capsys) -> None:
    (tmp_path / "patches").mkdir(mode=0o555)
    before = snapshot(tree)

    assert run(tmp_path, tree) == 1

    assert f"{tmp_path / 'patches'} is read-only" in capsys.readouterr().err
    assert snapshot(tree) == before


def test_a_checkout_that_another_git_holds(tree: Path, refused) -> None:
    """Git refuses at the last step; the commits before it leave nothing."""
    make_checkout(tree)
    (tree / ".git/index.lock").write_text("")

    assert "git switch in" in refused(tree)


def test_a_git_folder_that_leads_nowhere(tree: Path, refused) -> None:
    (tree / ".git").write_text("gitdir: /nowhere\n")

    assert "git status in" in refused(tree)


def test_a_folder_that_is_no_vllm(tmp_path: Path, refused) -> None:
    (tmp_path / "other").mkdir()

    assert "is no source tree of vLLM" in refused(tmp_path / "other")


def test_an_anchor_that_does_not_fit(tree: Path, refused) -> None:
    text = (tree / REQUEST).read_text()
    (tree / REQUEST).write_text(text.replace("def use_structured_output", "def other"))

    words = refused(tree)

    assert f"{REQUEST}: anchor '    def use_structured_output' is not there" in words


def test_a_new_file_that_is_there(tree: Path, refused) -> None:
    path = SERIES[0].new_files[0]
    (tree / path).write_text("")

    assert f"{path} is there already" in refused(tree)


def test_a_commit_that_cannot_be_left_out(tree: Path, refused) -> None:
    assert "'core' cannot be left out" in refused(tree, "--without", "core")


# One edit


@pytest.mark.parametrize(
    ("edit", "text", "expected"),
    [
        (Edit("f", at="b", put="X"), "a b c\n", "a X c\n"),
        (Edit("f", at="b", until="d", put="X"), "a b c d e\n", "a X e\n"),
        (Edit("f", at="b", put="X\n", how="before"), "a\n b\nc\n", "a\nX\n b\nc\n"),
        (Edit("f", at="b", put="X\n", how="after"), "a\n b\nc\n", "a\n b\nX\nc\n"),
        (Edit("f", at="b", within="a", put="X"), "b a b b\n", "b a X b\n"),
        (Edit("f", at="b", put="X", how="everywhere"), "b b\n", "X X\n"),
    ],
)
def test_an_edit(edit: Edit, text: str, expected: str) -> None:
    assert edit.apply(text) == expected


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (Edit("f", at="z", put=""), "'z' is not there"),
        (Edit("f", at="b", put=""), "'b' is 2 times there"),
        (Edit("f", at="a", until="z", put=""), "'z' is not there after 'a'"),
        (Edit("f", at="a", within="c", put=""), "'a' is not there after 'c'"),
        (Edit("f", at="z", put="", how="everywhere"), "'z' is not there"),
    ],
)
def test_an_edit_that_does_not_fit(edit: Edit, found: str) -> None:
    with pytest.raises(AnchorError, match=f"^f: anchor {found}"):
        edit.apply("a b b c\n")

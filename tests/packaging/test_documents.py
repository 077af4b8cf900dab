# SPDX-License-Identifier: Apache-2.0
"""What the pages name is there: links, make targets, tests, settings, metrics."""

import functools
import re
from pathlib import Path

import msgspec
import pytest

from vllm.junctions.config import REPAIR_NAMES, JunctionsConfig
from vllm.junctions.metrics.counted import METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[dtb]*/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page):
    targets = set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    named = set(re.findall(r"(?:`|\$ )make ([a-z][\w-]*)", page.read_text()))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_modules_and_tests_exist(page):
    text = page.read_text()
    # Of the folder that the page is about, or of the repository.
    folders = (page.parent, ROOT, ROOT / "tests", ROOT / "vllm" / "junctions")
    for path in re.findall(r"`([a-z]\w*/[\w/]+\.(?:py|json))\b", text):
        # Results are written by what the page tells to run.
        if "results/" not in path:
            assert any((folder / path).exists() for folder in folders), path
    for module in re.findall(r"python -m ([a-z][\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        places = (path.with_suffix(".py"), path / "__main__.py")
        assert module == "pytest" or any(place.exists() for place in places), module
    for name, more in re.findall(r"\b(test_\w+)(\*?)(?![\w.])", text):
        assert any(n == name or (more and n.startswith(name)) for n in _tests()), name


@functools.cache
def _tests() -> frozenset[str]:
    """Return the names of all tests."""
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    return frozenset(re.findall(r"def (test_\w+)\(", "\n".join(sources)))


def test_the_readme_has_all_settings_and_their_defaults():
    table = (ROOT / "README.md").read_text().partition("## Settings")[2]
    rows = re.findall(r"^\| `(junctions\w*)` \|[^|]+\| `([^`]+)`", table, re.MULTILINE)
    assert dict(rows) == {
        field.name: msgspec.json.encode(field.default).decode()
        for field in msgspec.structs.fields(JunctionsConfig)
    }


def test_all_repairs_are_on_their_page():
    page = (ROOT / "docs" / "repairs.md").read_text()
    assert set(re.findall(r"^- `(\w+)`:", page, re.MULTILINE)) == set(REPAIR_NAMES)


def test_each_metric_is_on_one_page_with_its_labels():
    page = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    named = re.findall(r"^\| `(vllm:junctions_\w+)", page, re.MULTILINE)
    assert sorted(named) == sorted(metric.name for metric in METRICS)
    for metric in METRICS:
        for value in (value for values in metric.known_values for value in values):
            assert f"`{value}`" in page

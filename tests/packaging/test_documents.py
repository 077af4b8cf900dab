# SPDX-License-Identifier: Apache-2.0
"""What the pages say is there: links, make targets, settings, metrics, repairs."""

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


def test_all_settings_are_in_the_readme():
    table = (ROOT / "README.md").read_text().partition("## Settings")[2]
    named = re.findall(r"^\| `(junctions\w*)` \|", table, re.MULTILINE)
    assert set(named) == {
        field.name for field in msgspec.structs.fields(JunctionsConfig)
    }


def test_all_repairs_are_on_their_page():
    page = (ROOT / "docs" / "repairs.md").read_text()
    assert set(re.findall(r"^- `(\w+)`:", page, re.MULTILINE)) == set(REPAIR_NAMES)


def test_all_metrics_are_on_their_page():
    page = (ROOT / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"^\| `(vllm:junctions_\w+)", page, re.MULTILINE))
    assert named == {metric.name for metric in METRICS}

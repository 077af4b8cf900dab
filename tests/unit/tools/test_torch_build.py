# SPDX-License-Identifier: Apache-2.0
"""In a new environment, where torch cannot be imported yet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TOOL = Path(__file__).parents[3] / "tools" / "torch_build.py"


def _say(site: Path) -> tuple[int, str, str]:
    # No site-packages, and no folder of the tool: what is in `site` alone.
    done = subprocess.run(
        [sys.executable, "-S", _TOOL],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("cuda", "said"), [("'13.0'", (0, "13.0", "")), ("None", (1, "", ""))]
)
def test_it_tells_cuda_builds_of_a_torch_that_lacks_its_dependencies(
    tmp_path, cuda, said
):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("import typing_extensions")
    (package / "version.py").write_text(
        f"from typing import Optional\ncuda: Optional[str] = {cuda}\n"
    )
    assert _say(tmp_path) == said


def test_it_says_nothing_where_there_is_no_torch(tmp_path):
    assert _say(tmp_path) == (1, "", "")

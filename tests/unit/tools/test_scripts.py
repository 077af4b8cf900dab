# SPDX-License-Identifier: Apache-2.0
"""What shell scripts must not do."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_SCRIPTS = [*(_ROOT / "tools").glob("*.sh"), _ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda path: path.name)
def test_no_script_asks_a_pipe_that_may_break(script):
    """``grep -q`` leaves at its first match; pipefail makes that a failure at times.

    A library that was there was missing in 7 of 200 runs of the set-up.
    """
    text = script.read_text()
    assert "pipefail" in text
    assert not re.search(r"\|\s*(grep -q|head)\b", text)

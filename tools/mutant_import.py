# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: import ``vllm.junctions`` from the folder ``JUNCTIONS_PACKAGE``.

``python -m pytest -p tools.mutant_import`` runs the tests on a copy of the package,
whatever is installed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_NAME = "vllm.junctions"


class _FromFolder(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME:
            return None
        return importlib.util.spec_from_file_location(
            _NAME,
            self._folder / "__init__.py",
            submodule_search_locations=[str(self._folder)],
        )


if "JUNCTIONS_PACKAGE" in os.environ:
    assert _NAME not in sys.modules, f"{_NAME} is already imported"
    sys.meta_path.insert(0, _FromFolder(Path(os.environ["JUNCTIONS_PACKAGE"])))

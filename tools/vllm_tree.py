# SPDX-License-Identifier: Apache-2.0
"""Unpack vLLM's source packages under ``.cache/``, one folder a version.

``.cache/vllm-X`` holds vLLM's pure-Python tree and its tests. ``.cache/runtime-X``
holds that tree alone, presented as a CPU build: put first on ``PYTHONPATH`` it
takes the place of the installed vLLM for all but model execution.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".cache"


def tree(version: str) -> Path:
    """Return the unpacked source of ``version``; fetch it if it is not there."""
    folder = CACHE / f"vllm-{version}"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            archive = _download(version, Path(temporary))
            with tarfile.open(archive) as source:
                source.extractall(temporary, filter="data")
            # Renamed in one go, so that a broken download leaves nothing behind.
            (Path(temporary) / f"vllm-{version}").rename(folder)
    return folder


def runtime(version: str) -> Path:
    """Return a folder for ``PYTHONPATH`` that runs ``version`` as a CPU build."""
    return runtime_of(tree(version), version, CACHE / f"runtime-{version}")


def runtime_of(source: Path, version: str, folder: Path) -> Path:
    """Present ``source``, a tree of ``version``, as a CPU build in ``folder``."""
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    # vLLM takes the platform from its distribution's version.
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    link = folder / "vllm"
    if not link.exists():
        link.symlink_to(source / "vllm", target_is_directory=True)
    return folder


def _download(version: str, directory: Path) -> Path:
    # pip reads the metadata of a source package by running its build script: this
    # tells that script to build nothing and not to look for a git checkout.
    environment = {
        **os.environ,
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": version,
    }
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--no-binary", "vllm", "--no-build-isolation"),
            *("--disable-pip-version-check", "--dest", str(directory)),
            f"vllm=={version}",
        ],
        check=True,
        env=environment,
    )
    return next(directory.glob("vllm-*.tar.gz"))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"vLLM {name}: {runtime(name)}")

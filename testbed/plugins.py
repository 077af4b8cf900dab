# SPDX-License-Identifier: Apache-2.0
"""Load a function of the test bed in every process of a vLLM server.

vLLM runs the entry points of the group ``vllm.general_plugins`` in each of its
processes. Python finds entry points by their metadata on the path, so a folder with
that metadata is enough: nothing is installed, and nobody else's vLLM sees it.
"""

import os
from pathlib import Path

_REPOSITORY = Path(__file__).parents[1]


def write_plugin(directory: Path, name: str, function: str) -> dict[str, str]:
    """Write a plugin's metadata; return the environment that loads it.

    Args:
        directory: Where to.
        name: Of the plugin, a valid distribution name with underscores.
        function: Entry point, ``package.module:function``.
    """
    metadata = directory / f"{name}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"
    )
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{name} = {function}\n"
    )
    paths = [str(directory), str(_REPOSITORY)]
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    return {"PYTHONPATH": os.pathsep.join(paths)}

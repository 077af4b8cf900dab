# SPDX-License-Identifier: Apache-2.0
"""Says which CUDA the installed torch was built for, without importing torch.

Exit status 1, and nothing printed: for none, or there is no torch. A new environment
holds torch before it holds what ``import torch`` needs.
"""

import importlib.util
import runpy
import sys
from pathlib import Path


def cuda_version() -> str | None:
    """Return for example ``"13.0"``; None for a CPU build, or without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]


if __name__ == "__main__":
    if (cuda := cuda_version()) is None:
        sys.exit(1)
    print(cuda)

# SPDX-License-Identifier: Apache-2.0
"""Apply the series to a tree of vLLM, as commits on a branch and as patch files.

``make patches``: to a copy of the source package of each supported version, below
``.cache/``. ``make patches TREE=path [VERSION=x]``: to the checkout or the unpacked
source package there. Where anything does not fit, a sentence says what, nothing is
changed, and the exit status is 1.
"""

import argparse
import sys
from pathlib import Path

from tools.series.apply import PATCHES, Applied, apply_to, patched_tree
from tools.series.edits import AnchorError
from tools.series.git import BRANCH
from tools.series.records import VERSIONS
from tools.series.trees import Refused


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, help="default: fetched source packages")
    parser.add_argument("--version", help=f"records to use: {', '.join(VERSIONS)}")
    parser.add_argument("--without", nargs="*", default=[], help="commits to leave out")
    parser.add_argument("--patches", type=Path, default=PATCHES, help="for the files")
    args = parser.parse_args(argv)
    try:
        if args.tree is not None:
            tree = args.tree.resolve()
            _print(apply_to(tree, args.version, args.without, args.patches.resolve()))
        else:
            for version in [args.version] if args.version else VERSIONS:
                _print(patched_tree(version, args.without))
    except (Refused, AnchorError) as refusal:
        print(f"patches: {refusal}", file=sys.stderr)
        return 1
    return 0


def _print(applied: Applied) -> None:
    print(f"{applied.tree} (vLLM {applied.found}): branch {BRANCH}")
    for patch in applied.patches:
        print(f"  {patch}")


if __name__ == "__main__":
    sys.exit(main())

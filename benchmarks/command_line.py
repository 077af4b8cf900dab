# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks' command lines have in common."""

import argparse
from types import FrameType


def positive(text: str) -> int:
    """Return an argument as a number above 0.

    Raises:
        argparse.ArgumentTypeError: It is none above 0.
    """
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """Exit as a shell says it; unwinds every ``with`` block, which ends servers.

    Raises:
        SystemExit: Always.
    """
    raise SystemExit(128 + number)

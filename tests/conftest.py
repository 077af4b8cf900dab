# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heeded() -> None:
    """Also in programs that tests start, where a shell's ``&`` has them ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

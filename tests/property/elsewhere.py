# SPDX-License-Identifier: Apache-2.0
"""The same scenario in another process, whose vLLM is another one.

A process has one vLLM: with the in-tree series or without. A law that compares the
two runs one side here and asks a worker process for the other.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

from testbed.box import Side
from tests.property.scenarios import Scenario

# Takes a scenario and a side; importable, and so is what it returns.
Observer = Callable[[Scenario, Side], Any]


class Elsewhere:
    """A worker process that runs scenarios on an unpatched vLLM.

    Args:
        python_path: Folder that brings its vLLM; empty for the installed one.
    """

    def __init__(self, python_path: str) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("JUNCTIONS_SIDE", "VLLM_PLUGINS")
        }
        environment["PYTHONPATH"] = python_path
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.property.elsewhere"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def observe(self, observer: Observer, scenario: Scenario, side: Side) -> Any:
        """Return what ``observer`` returns there.

        Raises:
            RuntimeError: It raised something there; with its traceback.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((observer, scenario, side), self._process.stdin)
        self._process.stdin.flush()
        failed, outcome = pickle.load(self._process.stdout)
        if failed:
            raise RuntimeError(f"in the other process:\n{outcome}")
        return outcome

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    import traceback

    while True:
        try:
            observer, scenario, side = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = (False, observer(scenario, side))
        except BaseException:
            answer = (True, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # Answers alone go to the real standard output; whatever prints, prints elsewhere.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _serve(sys.stdin.buffer, answers)

# SPDX-License-Identifier: Apache-2.0
"""The servers that `make bench-gsm8k` compares, on this machine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed import gemma3_270m
from testbed.server import VllmServer
from testbed.store import MooncakeMaster

_SEGMENT_BYTES = 4 << 30
_MAX_MODEL_TOKENS = 4096
# Three servers that start at once on two busy cores.
_START_SECONDS = 1200.0


@dataclass(frozen=True)
class Arm:
    """One way to serve the model.

    Attributes:
        junctions: None: no store at all.
        reset_local_cache: Before each question.
    """

    name: str
    summary: str
    junctions: bool | None
    reset_local_cache: bool = True


ARMS = {
    arm.name: arm
    for arm in (
        Arm("none", "no store, local cache reset", None),
        Arm("stock", "store without junctions, local cache reset", False),
        Arm("junctions", "store with junctions, local cache reset", True),
        Arm("local", "no store, local cache kept", None, reset_local_cache=False),
    )
}


@contextmanager
def serving(arm: Arm, dtype: str, num_threads: int, work_dir: Path) -> Iterator[str]:
    """Serve Gemma 3 270M as the arm says; give the server's URL.

    Raises:
        ProcessFailed: The store or the server did not start.
    """
    model = gemma3_270m.model_folder()
    arguments = [
        *("--model", str(model)),
        *("--served-model-name", gemma3_270m.NAME),
        *("--block-size", str(gemma3_270m.BLOCK_TOKENS)),
        *("--load-format", "safetensors"),
        "--no-skip-tokenizer-init",
        *("--dtype", dtype),
        *("--max-model-len", str(_MAX_MODEL_TOKENS)),
    ]
    arm_dir = work_dir / arm.name
    with ExitStack() as stack:
        config = None
        if arm.junctions is not None:
            master = stack.enter_context(MooncakeMaster(arm_dir))
            config = master.write_client_config(_SEGMENT_BYTES)
        server = VllmServer(
            arguments,
            arm_dir,
            mooncake_config=config,
            junctions=arm.junctions,
            env={"OMP_NUM_THREADS": str(num_threads)},
            start_seconds=_START_SECONDS,
        )
        yield stack.enter_context(server).base_url

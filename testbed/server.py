# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server on loopback."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from testbed.processes import ChildProcess, free_port, free_port_range

# A server that ends while it starts is noticed at once; on a machine that others keep
# busy, a start that takes half a minute alone was seen to take five.
_START_SECONDS = 600.0


class VllmServer:
    """Starts an OpenAI-compatible server; ``with`` ends it.

    Args:
        model_args: Arguments that select the model, see ``TinyModel.write``.
        work_dir: Where its log goes.
        mooncake_config: File for ``MOONCAKE_CONFIG_PATH``; None: no connector.
        junctions: Value of the ``junctions`` setting; None leaves it out.
        kv_transfer_config: Settings on top of the usual ones.
        server_args: Further arguments.
        env: Further environment.
        start_seconds: How long it may take until it answers.
    """

    def __init__(
        self,
        model_args: Sequence[str],
        work_dir: Path,
        *,
        mooncake_config: Path | None = None,
        junctions: bool | None = None,
        kv_transfer_config: Mapping[str, Any] | None = None,
        server_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        module: str = "vllm.entrypoints.openai.api_server",
        start_seconds: float = _START_SECONDS,
    ) -> None:
        self.work_dir = work_dir
        self._start_seconds = start_seconds
        self.port = free_port()
        # The server goes by the model's path.
        self.model = model_args[model_args.index("--model") + 1]
        self._command = [
            sys.executable,
            "-m",
            module,
            *_default_arguments(),
            *model_args,
            "--port",
            str(self.port),
            *server_args,
        ]
        # A Unix socket's path has room for about 100 characters, so not work_dir.
        self.socket_dir = tempfile.mkdtemp(prefix="vj-")
        self._env = {**_default_env(self.socket_dir), **(env or {})}
        if mooncake_config is not None:
            transfer = _transfer_config(junctions, kv_transfer_config or {})
            self._command += [
                "--kv-transfer-config",
                msgspec.json.encode(transfer).decode(),
            ]
            self._env["MOONCAKE_CONFIG_PATH"] = str(mooncake_config)
        self.process: ChildProcess | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, wait: bool = True) -> "VllmServer":
        """Start the process, and by default wait until it answers."""
        self.process = ChildProcess(
            "vLLM server", self._command, self.work_dir / "server.log", self._env
        )
        return self.wait_ready() if wait else self

    def wait_ready(self) -> "VllmServer":
        assert self.process is not None, "wait_ready before start"
        try:
            self.process.wait_until(self._healthy, self._start_seconds)
        except BaseException:
            # ``with`` has not entered its block yet, so it would not end it.
            self.stop()
            raise
        return self

    def _healthy(self) -> bool:
        try:
            # Certificates take longer to read than the answer, every time.
            url = f"{self.base_url}/health"
            return httpx.get(url, timeout=2, verify=False).is_success
        except httpx.HTTPError:
            return False

    def log(self) -> str:
        """Return everything the server printed."""
        return (self.work_dir / "server.log").read_text(errors="replace")

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None
        shutil.rmtree(self.socket_dir, ignore_errors=True)

    def __enter__(self) -> "VllmServer":
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


@contextlib.contextmanager
def serving(*servers: VllmServer) -> Iterator[None]:
    """Start servers side by side, and end them all.

    Most of a start is one thread's work, so two take little longer than one.
    """
    with contextlib.ExitStack() as exits:
        for server in servers:
            exits.callback(server.stop)
            server.start(wait=False)
        for server in servers:
            server.wait_ready()
        yield


def _default_arguments() -> list[str]:
    return [
        "--host",
        "127.0.0.1",
        "--load-format",
        "dummy",
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
        "--max-model-len",
        "16384",
        "--enforce-eager",
    ]


def _default_env(socket_dir: str) -> dict[str, str]:
    first_port, last_port = free_port_range(64)
    return {
        # Block hashes of several instances agree only on the same seed.
        "PYTHONHASHSEED": "0",
        "VLLM_SERVER_DEV_MODE": "1",
        # Whatever the starter's own, tests and people read these logs.
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_HOST_IP": "127.0.0.1",
        "MC_MIN_RPC_PORT": str(first_port),
        "MC_MAX_RPC_PORT": str(last_port),
        # Names the lookup socket: two servers of one host need different ones.
        "VLLM_RPC_BASE_PATH": socket_dir,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Several servers share few cores: threads that wait must not spin.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        # One thread is plenty for a tiny model; binding it starves others.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _transfer_config(
    junctions: bool | None, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    extra = dict(overrides.get("kv_connector_extra_config", {}))
    if junctions is not None:
        extra["junctions"] = junctions
    return {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        **overrides,
        "kv_connector_extra_config": extra,
    }

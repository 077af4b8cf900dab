# SPDX-License-Identifier: Apache-2.0
"""A real ``mooncake_master`` on loopback."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec

from testbed.processes import ChildProcess, ProcessFailed, free_port


class MooncakeConfig(msgspec.Struct):
    """What ``MOONCAKE_CONFIG_PATH`` points at."""

    master_server_address: str
    global_segment_size: int
    local_buffer_size: int
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""


class MooncakeMaster:
    """Starts a master; ``with`` ends it.

    ``extra_args`` come last, so they win over the usual ones.
    """

    def __init__(
        self,
        work_dir: Path,
        rpc_port: int | None = None,
        extra_args: Sequence[str] = (),
    ) -> None:
        self.work_dir = work_dir
        self._extra_args = extra_args
        self.rpc_port = rpc_port or free_port()
        self._metrics_port = free_port()
        self._process: ChildProcess | None = None

    def start(self) -> "MooncakeMaster":
        self._process = ChildProcess(
            "mooncake_master",
            [
                _binary(),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.rpc_port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self._metrics_port}",
                # Generous on purpose: on a busy small machine a client that is
                # merely slow must not lose its segment or the lease of a read.
                "--client_ttl=60",
                "--default_kv_lease_ttl=60000",
                *self._extra_args,
            ],
            self.work_dir / "mooncake_master.log",
        )
        try:
            self._process.wait_until(self._answers, 30)
        except BaseException:
            self.stop()
            raise
        return self

    def _answers(self) -> bool:
        try:
            return httpx.get(self.metrics_url, timeout=2).is_success
        except httpx.HTTPError:
            return False

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self._metrics_port}/metrics"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the master is not running"
        return self._process.pid

    def key_count(self) -> int:
        """Return how many keys the store holds."""
        for line in httpx.get(self.metrics_url, timeout=5).text.splitlines():
            if line.startswith("master_key_count "):
                return int(float(line.split()[1]))
        raise ProcessFailed("mooncake_master reports no master_key_count")

    def keys(self) -> set[str]:
        """Return every key of the store."""
        url = self.metrics_url.replace("/metrics", "/get_all_keys")
        return set(httpx.get(url, timeout=10).text.split())

    def wait_until_still(self, still_seconds: float = 1.0) -> int:
        """Wait until the key count has not changed for a while; return it."""
        count, since = self.key_count(), time.monotonic()
        while time.monotonic() - since < still_seconds:
            time.sleep(0.1)
            if (now := self.key_count()) != count:
                count, since = now, time.monotonic()
        return count

    def write_client_config(
        self, segment_bytes: int = 512 << 20, buffer_bytes: int = 128 << 20
    ) -> Path:
        """Write the JSON that an instance's ``MOONCAKE_CONFIG_PATH`` names."""
        config = MooncakeConfig(
            f"127.0.0.1:{self.rpc_port}", segment_bytes, buffer_bytes
        )
        path = self.work_dir / f"mooncake-{self.rpc_port}-{segment_bytes}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(config))
        return path

    def kill(self) -> None:
        """End the master as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def __enter__(self) -> "MooncakeMaster":
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _binary() -> str:
    beside_python = Path(sys.executable).with_name("mooncake_master")
    if beside_python.exists():
        return str(beside_python)
    found = shutil.which("mooncake_master")
    if found is None:
        raise ProcessFailed(
            "mooncake_master is not installed; run 'make setup', or pip install "
            "mooncake-transfer-engine-non-cuda"
        )
    return found


class StoreClient:
    """Reads and overwrites values of a store from outside vLLM."""

    def __init__(self, master: MooncakeMaster) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        status = self._store.setup(
            f"127.0.0.1:{free_port()}",
            "P2PHANDSHAKE",
            0,  # no segment: values stay with the servers
            16 << 20,
            "tcp",
            "",
            f"127.0.0.1:{master.rpc_port}",
        )
        if status != 0:
            raise ProcessFailed(f"mooncake client set-up failed with {status}")

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def overwrite(self, key: str, value: bytes) -> None:
        status = self._store.upsert(key, value)
        if status != 0:
            raise ProcessFailed(f"overwriting {key} failed with {status}")

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

# SPDX-License-Identifier: Apache-2.0
"""The servers of a soak: two instances on one store, and one that is always cold."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak import watch
from benchmarks.soak.report import ProcessMemory
from testbed.models import TinyModel
from testbed.plugins import write_plugin
from testbed.processes import ProcessFailed
from testbed.server import VllmServer
from testbed.store import MooncakeMaster

_START_SECONDS = 600.0
_REST_SECONDS = 180.0
# Longer than the watching threads take to report twice.
_SETTLE_SECONDS = 1.2
# What a new process gains while caches and the store fill is no growth.
WARM_UP_SECONDS = 240.0
_WEIGHTS_SEED = 1
MAX_MODEL_TOKENS = 3072
_SMALL_CACHES = (
    *("--max-model-len", str(MAX_MODEL_TOKENS)),
    *("--num-gpu-blocks-override", "200"),
    *("--max-num-batched-tokens", "512"),
    *("--max-num-seqs", "8"),
    "--enable-prompt-tokens-details",
)
_SEGMENT_BYTES = 16 << 20
_BUFFER_BYTES = 32 << 20
# Short enough for a small store to evict, and for a dead instance's segment to go.
_MASTER_ARGS = ("--client_ttl=10", "--default_kv_lease_ttl=5000")
# oneDNN keeps a primitive for each number of tokens a step ever had, by default up to
# 1024 of them: hundreds of MiB, in which a leak would not be seen.
_FEW_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
_COUNTERS = {
    "vllm:prefix_cache_queries": "prompt_tokens",
    "vllm:prefix_cache_hits": "local_hit_tokens",
    "vllm:external_prefix_cache_hits": "hit_tokens",
    "vllm:num_preemptions": "preemptions",
}


class Leak(RuntimeError):
    """An instance at rest still holds something."""

    def __init__(self, instance: str, held: dict[str, int]) -> None:
        super().__init__(f"{instance} at rest still holds {held}")
        self.num_references = sum(held.values())


class Instance:
    """One server that can be killed and started again, with a gate for traffic.

    Attributes:
        generation: How often it has been started.
        dead: Set before a fault kills it, until it serves again.
    """

    def __init__(self, name: str, make_server: Callable[[str], VllmServer]) -> None:
        self.name = name
        self.generation = 0
        self.dead = True
        self._make_server = make_server
        self._gate = asyncio.Event()
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._past_counters: Counter[str] = Counter()
        self._counters: Counter[str] = Counter()
        self._memory: dict[int, ProcessMemory] = {}
        self._started = 0.0
        self.server: VllmServer | None = None

    @property
    def is_open(self) -> bool:
        return self._gate.is_set()

    @property
    def url(self) -> str:
        assert self.server is not None, f"{self.name} was never started"
        return self.server.base_url

    @property
    def model(self) -> str:
        assert self.server is not None, f"{self.name} was never started"
        return self.server.model

    @property
    def watch_dir(self) -> Path:
        assert self.server is not None, f"{self.name} was never started"
        return self.server.work_dir / "watch"

    def start(self) -> None:
        """Start its server, with a log of its own, and do not wait for it."""
        self.generation += 1
        self.server = self._make_server(f"{self.name}-{self.generation}")
        self.server.start(wait=False)

    async def wait_ready(self, http: httpx.AsyncClient) -> None:
        """Wait until the server answers a request, then let traffic in.

        Raises:
            ProcessFailed: It ended, or took too long.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not await _is_healthy(http, self.url):
            assert self.server is not None
            process = self.server.process
            if process is None or not process.running or time.monotonic() > deadline:
                tail = process.log_tail() if process else ""
                raise ProcessFailed(f"{self.name} did not start:\n{tail}")
            await asyncio.sleep(0.5)
        self.dead = False
        self._started = time.monotonic()
        self.open()

    def open(self) -> None:
        self._gate.set()

    def close(self) -> None:
        """Let no further request in; those that are under way go on."""
        self._gate.clear()

    async def enter(self) -> None:
        """Wait for the gate; every ``enter`` needs a ``leave``."""
        # Between its opening and our turn it may have been closed again.
        while not self.is_open:
            await self._gate.wait()
        self._num_active += 1
        self._idle.clear()

    def leave(self) -> None:
        self._num_active -= 1
        if not self._num_active:
            self._idle.set()

    async def check_at_rest(self, http: httpx.AsyncClient) -> None:
        """Wait until nobody uses it; then it must hold nothing, and reset its cache.

        Traffic has to be shut out.

        Raises:
            Leak: It holds something that it does not let go.
        """
        await self._idle.wait()
        deadline = time.monotonic() + _REST_SECONDS
        while True:
            since = time.monotonic()
            reply = await http.post(f"{self.url}/reset_prefix_cache")
            reset = reply.is_success and reply.json()["success"]
            await asyncio.sleep(_SETTLE_SECONDS)
            held = watch.held(self.watch_dir, since)
            if reset and held == {}:
                return
            if time.monotonic() > deadline:
                if held is None:
                    raise Leak(self.name, {"no report": 1})
                raise Leak(self.name, held or {"reset refused": 1})

    def kill(self) -> None:
        """End it as a crash would. What it counted last is kept."""
        assert self.server is not None
        assert self.server.process is not None
        self.dead = True
        self.close()
        self.server.process.kill()
        self.server.stop()
        self._past_counters += self._counters
        self._counters = Counter()

    async def measure(self, http: httpx.AsyncClient) -> None:
        """Read its counters and its memory; a dead one has none."""
        if self.dead:
            return
        try:
            text = (await http.get(f"{self.url}/metrics")).text
        except httpx.HTTPError:
            return
        self._counters = read_counters(text)
        self._measure_memory()

    def _measure_memory(self) -> None:
        assert self.server is not None
        age = time.monotonic() - self._started
        if self.server.process is None or age < WARM_UP_SECONDS:
            return
        for pid, name, resident in resident_bytes(self.server.process.pid):
            label = f"{self.name}-{self.generation} {name}"
            memory = self._memory.setdefault(
                pid, ProcessMemory(label, 0.0, resident, resident)
            )
            memory.last_bytes = resident
            memory.seconds = age - WARM_UP_SECONDS

    @property
    def counters(self) -> Counter[str]:
        return self._past_counters + self._counters

    @property
    def memory(self) -> list[ProcessMemory]:
        return list(self._memory.values())


async def _is_healthy(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/health", timeout=5)).is_success
    except httpx.HTTPError:
        return False


def read_counters(text: str) -> Counter[str]:
    """Return a report's counters from a server's ``/metrics``.

    Failed keys of store operations are named ``failed_keys:operation``.
    """
    counters: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue
            if family.name in _COUNTERS:
                counters[_COUNTERS[family.name]] += int(sample.value)
            if "mooncake_store" in family.name and "failed_keys" in family.name:
                operation = sample.labels["operation"]
                counters[f"failed_keys:{operation}"] += int(sample.value)
    return counters


def resident_bytes(pid: int) -> list[tuple[int, str, int]]:
    """Return pid, name and resident bytes of a server's processes below ``pid``."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            command = process.cmdline()
            resident = process.memory_info().rss
        except psutil.Error:
            continue
        if command[:1] and command[0].startswith("VLLM::"):
            found.append((process.pid, command[0], resident))
        elif "vllm.entrypoints.openai.api_server" in command:
            found.append((process.pid, "API server", resident))
    return found


class Fleet:
    """A master, two instances and a cold server; ``with`` ends them all."""

    def __init__(self, model: TinyModel, work_dir: Path, junctions: bool) -> None:
        self._model = model
        self._work_dir = work_dir
        self._junctions = junctions
        self._exits = ExitStack()
        self.master = MooncakeMaster(work_dir / "master", extra_args=_MASTER_ARGS)
        self._past_evicted_keys = 0
        self._evicted_keys = 0

    def __enter__(self) -> "Fleet":
        self._model_args = self._model.write(self._work_dir, _WEIGHTS_SEED)
        self._exits.enter_context(self.master)
        self._config = self.master.write_client_config(_SEGMENT_BYTES, _BUFFER_BYTES)
        self.cold = Instance("cold", self._make_cold_server)
        self.instances = [Instance(name, self._make_server) for name in ("one", "two")]
        for instance in (self.cold, *self.instances):
            self._exits.callback(_stop, instance)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.close()

    def _make_cold_server(self, name: str) -> VllmServer:
        return VllmServer(
            self._model_args,
            self._work_dir / name,
            server_args=(*_SMALL_CACHES, "--no-enable-prefix-caching"),
            env=_FEW_PRIMITIVES,
        )

    def _make_server(self, name: str) -> VllmServer:
        work_dir = self._work_dir / name
        (work_dir / "watch").mkdir(parents=True)
        plugin = write_plugin(
            work_dir / "plugins", "soak_watch", "benchmarks.soak.watch:register"
        )
        return VllmServer(
            self._model_args,
            work_dir,
            mooncake_config=self._config,
            junctions=self._junctions,
            kv_transfer_config={"kv_load_failure_policy": "recompute"},
            server_args=_SMALL_CACHES,
            env={
                **plugin,
                **_FEW_PRIMITIVES,
                watch.DIRECTORY_VARIABLE: str(work_dir / "watch"),
            },
        )

    async def start(self, http: httpx.AsyncClient) -> None:
        for instance in (self.cold, *self.instances):
            instance.start()
        for instance in (self.cold, *self.instances):
            await instance.wait_ready(http)

    async def measure(self, http: httpx.AsyncClient) -> None:
        for instance in self.instances:
            await instance.measure(http)
        try:
            text = (await http.get(self.master.metrics_url)).text
        except httpx.HTTPError:
            return
        self._evicted_keys = _evicted_keys(text)

    def restart_master(self) -> None:
        """Kill the master, and start one that knows nothing, at the same address."""
        self.master.kill()
        self._past_evicted_keys += self._evicted_keys
        self._evicted_keys = 0
        self.master.start()

    @property
    def evicted_keys(self) -> int:
        return self._past_evicted_keys + self._evicted_keys


def _stop(instance: Instance) -> None:
    if instance.server is not None:
        instance.server.stop()


def _evicted_keys(text: str) -> int:
    for line in text.splitlines():
        if line.startswith("master_evicted_key_count "):
            return int(float(line.split()[1]))
    return 0

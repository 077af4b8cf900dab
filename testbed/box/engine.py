# SPDX-License-Identifier: Apache-2.0
"""One vLLM instance without a model: real scheduler, real connector, real threads."""

import contextlib
import os
import queue
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from testbed.box import environment
from testbed.box.config import (
    HASH_FUNCTION,
    MAX_MODEL_TOKENS,
    EngineOptions,
    acting_side,
    make_kv_cache_config,
    make_vllm_config,
)
from testbed.box.fingerprints import FingerprintBook, Sequence
from testbed.box.forward import FakeModelRunner
from testbed.box.layout import Layout
from testbed.box.memory_store import (
    Gate,
    MemoryStore,
    MemoryStoreClient,
    in_place_of_mooncake,
)
from testbed.box.requests import make_request
from testbed.store import MooncakeConfig

_WAIT_SECONDS = 30.0
_END_CONTEXT_SECONDS = 5.0
_MAX_STEPS = 2_000


class Stuck(RuntimeError):
    """Something that should have ended long ago has not."""


@dataclass
class Served:
    """What became of a request. Lengths in tokens."""

    request_id: str
    sequence: Sequence
    local_hit_tokens: int = 0
    store_hit_tokens: int = 0
    finish_reason: str | None = None

    @property
    def hit_tokens(self) -> int:
        return self.local_hit_tokens + self.store_hit_tokens


@dataclass
class _Step:
    """Block tables and tokens of one step, for comparisons."""

    num_scheduled_tokens: dict[str, int]
    block_tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)


class BoxEngine:
    """An instance that is stepped by hand.

    Attributes:
        served: Requests by id, in the order in which they were added.
        steps: What each step scheduled.
        client: Its connection to the stand-in store; None with a real one.
        saves: Holds its saves back.
        loads: Holds its loads back.
        num_padded_prefills: Requests that entered with draft rows for padding.
    """

    def __init__(
        self,
        layout: Layout,
        store: MemoryStore | Path,
        book: FingerprintBook,
        options: EngineOptions,
        name: str = "engine",
    ) -> None:
        self.layout = layout
        self.options = options
        self.name = name
        self.client: MemoryStoreClient | None = None
        self.served: dict[str, Served] = {}
        self.steps: list[_Step] = []
        self.num_padded_prefills = 0
        self._book = book
        self._requests: dict[str, Request] = {}
        self.vllm_config = make_vllm_config(layout, options)
        kv_cache_config, block_tokens, hash_tokens = make_kv_cache_config(
            layout, options, self.vllm_config
        )
        self._hasher = get_request_block_hasher(hash_tokens, HASH_FUNCTION)
        self.runner = FakeModelRunner(layout, options.num_blocks)
        if acting_side(options.side) not in ("stock", "patched"):
            from vllm.junctions.overlay.plugin import register

            register()
        # Each instance has its own lookup socket.
        self._socket_dir = tempfile.mkdtemp(dir=environment.work_dir())
        with self._environment(store if isinstance(store, Path) else _unused_config()):
            if isinstance(store, MemoryStore):
                self.client = store.client(name)
                with in_place_of_mooncake(self.client):
                    self.worker = self._create_worker(kv_cache_config)
            else:
                self.worker = self._create_worker(kv_cache_config)
            with _kept_when_it_fails():
                self.scheduler = Scheduler(
                    vllm_config=self.vllm_config,
                    kv_cache_config=kv_cache_config,
                    structured_output_manager=StructuredOutputManager(self.vllm_config),
                    block_size=block_tokens,
                    hash_block_size=hash_tokens,
                    log_stats=True,
                )
        self.worker.register_kv_caches(self.runner.kv_caches())
        self._allow_images()
        self._follow_sessions()
        self._lookups = Gate()
        self._gate_lookups()
        self.saves = self.client.saves if self.client else Gate()
        self.loads = self.client.loads if self.client else Gate()
        self._gate_transfers()

    def _gate_lookups(self) -> None:
        client = self._lookup_client()
        look_up = client._lookup

        def gated(*args: Any) -> Any:
            self._lookups.passed()
            return look_up(*args)

        client._lookup = gated

    def _gate_transfers(self) -> None:
        """Hold whole jobs back: one with nothing to transfer would slip through."""
        worker = self.worker.connector_worker
        if worker.kv_send_thread is not None:
            _gate_jobs(worker.kv_send_thread, self.saves)
        for thread in worker.kv_recv_threads:
            _gate_jobs(thread, self.loads)

    @contextlib.contextmanager
    def _environment(self, mooncake_config: Path) -> Iterator[None]:
        settings = {
            "VLLM_RPC_BASE_PATH": self._socket_dir,
            "MOONCAKE_CONFIG_PATH": str(mooncake_config),
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def _create_worker(self, kv_cache_config: Any) -> Any:
        return KVConnectorFactory.create_connector(
            config=self.vllm_config,
            role=KVConnectorRole.WORKER,
            kv_cache_config=kv_cache_config,
        )

    def _allow_images(self) -> None:
        """Give images room; the box's model, which is none, takes them all."""
        self.scheduler.max_num_encoder_input_tokens = MAX_MODEL_TOKENS
        self.scheduler.encoder_cache_manager = EncoderCacheManager(MAX_MODEL_TOKENS)

    def _follow_sessions(self) -> None:
        """Learn what a session's tokens are whenever more input reaches it."""
        update_session = self.scheduler._update_request_as_session

        def updated(session: Request, update: Any) -> None:
            update_session(session, update)
            served = self.served[session.request_id]
            served.sequence = Sequence(
                list(session.all_token_ids),
                self.layout.hash_tokens,
                served.sequence.origin,
            )
            self._book.learn(served.sequence, session.block_hashes)

        self.scheduler._update_request_as_session = updated

    # Requests

    def _make_request(
        self, prompt: list[int], request_id: str, max_tokens: int, **fields: Any
    ) -> Request:
        return make_request(prompt, request_id, max_tokens, self._hasher, **fields)

    def block_hashes(self, prompt: list[int]) -> list[bytes]:
        """Return the block hashes that a request with this prompt has."""
        return list(self._make_request(prompt, "unused", 1).block_hashes)

    def add(
        self, prompt: list[int], request_id: str, max_tokens: int = 1, **fields: Any
    ) -> Served:
        """Queue a request; it runs in the steps that follow.

        ``fields`` are further ones of ``Request``: ``resumable``, ``cache_salt``, ...;
        or ``prompt_logprobs`` or ``kv_transfer_params``.
        """
        request = self._make_request(prompt, request_id, max_tokens, **fields)
        served = Served(request_id, _sequence(request, self.layout.hash_tokens))
        self.served[request_id] = served
        self._requests[request_id] = request
        self._book.learn(served.sequence, request.block_hashes)
        self.scheduler.add_request(request)
        return served

    def add_input(self, more: list[int], session_id: str, is_last: bool) -> None:
        """Send a session its next input, or tell it that there is no more."""
        self.scheduler.add_request(
            self._make_request(more, session_id, 1, resumable=not is_last)
        )

    def request(self, request_id: str) -> Request:
        return self._requests[request_id]

    def step(self) -> SchedulerOutput:
        """Schedule, run the fake model, transfer, and update the scheduler."""
        with self._lookups_take_a_step():
            output = self.scheduler.schedule()
        self._record(output)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        sampled = self.runner.forward(
            output, lambda req_id: self.served[req_id].sequence
        )
        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        self.settle()
        connector_output = self._connector_output(output)
        self.worker.clear_connector_metadata()
        req_ids = list(output.num_scheduled_tokens)
        results = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
                sampled_token_ids=[sampled[req_id] for req_id in req_ids],
                kv_connector_output=connector_output,
            ),
        )
        self._learn_results(req_ids, results)
        return output

    @contextlib.contextmanager
    def _lookups_take_a_step(self) -> Iterator[None]:
        """Let asynchronous lookups end after the step that asked, never within it.

        Without this it would be chance, and no two runs would be the same.
        """
        if not self.options.extra_config.get("lookup_async"):
            yield
            return
        self._lookups.hold()
        try:
            yield
        finally:
            self._lookups.release()
            # And before its saves: what a lookup sees must not be chance either.
            self._wait_for_lookups()

    def _connector_output(self, output: SchedulerOutput) -> KVConnectorOutput:
        results = self.worker.get_transfer_results(output.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_stats=self.worker.get_kv_connector_stats(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )

    def _record(self, output: SchedulerOutput) -> None:
        for request in self.scheduler.requests.values():
            stats = request.prefill_stats
            if stats is not None and stats.num_prompt_tokens:
                served = self.served[request.request_id]
                served.local_hit_tokens = stats.num_local_cached_tokens
                served.store_hit_tokens = stats.num_external_cached_tokens
        drafts = output.scheduled_spec_decode_tokens
        self.num_padded_prefills += sum(-1 in rows for rows in drafts.values())
        manager = self.scheduler.kv_cache_manager
        scheduled = dict(output.num_scheduled_tokens)
        self.steps.append(
            _Step(
                scheduled,
                {req_id: manager.get_block_ids(req_id) for req_id in scheduled},
            )
        )

    def _learn_results(self, req_ids: list[str], results: Any) -> None:
        for req_id in req_ids:
            request = self._requests[req_id]
            self._book.learn(self.served[req_id].sequence, request.block_hashes)
        for outputs in results.values():
            for result in outputs.outputs:
                if result.finish_reason is not None:
                    self.served[result.request_id].finish_reason = str(
                        result.finish_reason
                    )

    # Progress

    def settle(self) -> None:
        """Wait for the worker's threads, except for what is held back."""
        worker = self.worker.connector_worker
        if worker.kv_send_thread is not None and not self.saves.held:
            _drain(worker.kv_send_thread.request_queue)
        if not self.loads.held:
            _drain(worker.recv_request_queue)
        self._wait_for_lookups()

    def _wait_for_lookups(self) -> None:
        for future in list(self._lookup_client().futures.values()):
            # The outcome belongs to the scheduler; here only the time matters.
            with contextlib.suppress(Exception):
                future.exception(timeout=_WAIT_SECONDS)

    def _lookup_client(self) -> Any:
        return self.scheduler.connector.connector_scheduler.client

    @property
    def idle(self) -> bool:
        """Whether no request runs and no save holds blocks."""
        return (
            not self.scheduler.has_requests()
            and not self.scheduler.connector.has_pending_push_work()
        )

    def run(self) -> None:
        """Step until all requests have ended and all saves have landed.

        Raises:
            Stuck: That takes far too many steps.
        """
        for _ in range(_MAX_STEPS):
            if self.idle:
                # Whatever the scheduler believes, look at what has landed.
                self.settle()
                return
            self.step()
        raise Stuck(f"{self.name}: requests are still running")

    def run_requests(self) -> None:
        """Step until all requests have ended; held saves may remain."""
        for _ in range(_MAX_STEPS):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise Stuck(f"{self.name}: requests are still running")

    def serve(
        self, prompt: list[int], request_id: str, max_tokens: int = 1, **fields: Any
    ) -> Served:
        """Run one request to its end, saves included; ``fields`` as for ``add``."""
        served = self.add(prompt, request_id, max_tokens, **fields)
        self.run()
        return served

    def preempt(self, count: int = 1) -> None:
        """Preempt the requests that entered last, as running out of blocks does.

        A step passes in which nothing resumes: vLLM never resumes a request in the
        pass that preempts it, and the connector relies on that.
        """
        scheduler = self.scheduler
        for _ in range(min(count, len(scheduler.running))):
            request = scheduler.running.pop()
            scheduler._preempt_request(request, time.monotonic())
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self.step()
        scheduler.set_pause_state(PauseState.UNPAUSED)

    @property
    def waits_for_memory(self) -> bool:
        """Whether requests wait for blocks that only other waiting requests hold.

        vLLM preempts running requests; one whose load has ended, but that waits for
        a block to run, keeps what it holds. Two of them can wait for each other.
        """
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        holders = sum(
            request.num_computed_tokens > 0 and not request.is_finished()
            for request in scheduler.requests.values()
        )
        return (
            not scheduler.running
            and holders > 1
            and pool.get_num_free_blocks() < 2 * len(self.layout.groups)
        )

    def abort_last(self) -> None:
        """Abort the request that came last, as its client would."""
        request_id = list(self.scheduler.requests)[-1]
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.served[request_id].finish_reason = "abort"

    def reset_local_cache(self) -> None:
        """Forget the local cache, as a fresh instance would have none.

        Raises:
            Stuck: Blocks are still in use.
        """
        if not self.scheduler.reset_prefix_cache():
            raise Stuck(f"{self.name}: blocks are in use, the cache cannot be reset")

    # End

    def close(self) -> None:
        """End every thread and close every socket of this instance."""
        worker = self.worker.connector_worker
        self.saves.release()
        self.loads.release()
        self.worker.shutdown()
        for thread in (worker.kv_send_thread, *worker.kv_recv_threads):
            if thread is not None:
                # Ending is no error: nobody needs to hear of it.
                thread._invoke_excepthook = lambda *_args: None
                thread.request_queue.put(_EndThread())
                thread.join(timeout=_WAIT_SECONDS)
        self._close_lookup_channel(worker)
        self.scheduler.shutdown()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _close_lookup_channel(self, worker: Any) -> None:
        client, server = self._lookup_client(), worker.lookup_server
        server.running = False

        def wake() -> None:
            client.socket.send(b"end")
            # On its way out the server may end without an answer.
            while server.thread.is_alive() and not client.socket.poll(timeout=20):
                pass

        client.executor.submit(wake).result(timeout=_WAIT_SECONDS)
        server.thread.join(timeout=_WAIT_SECONDS)
        client.close()
        client.executor.shutdown()
        server.close()
        _end_context(client.ctx)
        _end_context(server.ctx)

    def __enter__(self) -> "BoxEngine":
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def _sequence(request: Request, hash_tokens: int) -> Sequence:
    """Return what a request's KV depends on: tokens, images, adapter and salt."""
    assert request.prompt_token_ids is not None
    tokens = list(request.prompt_token_ids)
    for image in request.mm_features:
        at = image.mm_position
        number = zlib.crc32(image.identifier.encode())
        tokens[at.offset : at.offset + at.length] = [number] * at.length
    adapter = request.lora_request and request.lora_request.lora_name
    origin = zlib.crc32(f"{adapter} {request.cache_salt}".encode())
    if adapter is None and request.cache_salt is None:
        origin = 0
    return Sequence(tokens, hash_tokens, origin)


_FAILURES: list[BaseException] = []


@contextlib.contextmanager
def _kept_when_it_fails() -> Iterator[None]:
    """Keep what a failed constructor leaves behind.

    The garbage collector would end a ZMQ context of it before the context's sockets,
    and wait for those for ever.
    """
    try:
        yield
    except BaseException as error:
        _FAILURES.append(error)
        raise


def _end_context(context: zmq.Context) -> None:
    """End a ZMQ context, or leave it behind where it does not end.

    Once in some 100,000 times libzmq waits for ever for the end of a socket that was
    closed while its peer went away.
    """
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(timeout=_END_CONTEXT_SECONDS)


def _gate_jobs(thread: Any, gate: Gate) -> None:
    handle = thread._handle_request

    def gated(job: Any) -> None:
        gate.passed()
        handle(job)

    thread._handle_request = gated


def _unused_config() -> Path:
    """Return a Mooncake configuration for a store that reads none of it."""
    path = environment.work_dir() / "mooncake.json"
    if not path.exists():
        path.write_bytes(msgspec.json.encode(MooncakeConfig("", 1, 1)))
    return path


class _EndThread:
    """A job that ends the transfer thread which takes it.

    The threads survive every ``Exception`` and have no other way to end.
    """

    def __getattr__(self, name: str) -> Any:
        raise SystemExit


def _drain(jobs: "queue.Queue[Any]") -> None:
    with jobs.all_tasks_done:
        if not jobs.all_tasks_done.wait_for(
            lambda: not jobs.unfinished_tasks, timeout=_WAIT_SECONDS
        ):
            raise Stuck(f"{jobs.unfinished_tasks} transfer jobs never ended")

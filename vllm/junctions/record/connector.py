# SPDX-License-Identifier: Apache-2.0
"""A store connector that also records the requests it sees finish.

What is recorded, and what is not:

- A request whose whole prompt was computed, however it ended: an aborted one too. One
  that ended earlier left no prompt in the store, and is left out.
- Each sample of ``n`` is a request of its own to the engine, and a line of its own.
- A streaming session is one line when it ends, with all input it had by then.
- A prompt of embeddings, or one without block hashes, is left out.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from vllm.junctions.config import JunctionsConfig
from vllm.junctions.record.format import FORMAT_VERSION, Header, RecordedRequest
from vllm.junctions.record.layout import block_bytes_of, layout_of
from vllm.junctions.record.writer import Finished, IdMaker, RecordingWriter, now_ms
from vllm.junctions.seams.compat import vllm_version
from vllm.junctions.version import __version__

logger = init_logger(__name__)


class _Seen:
    """What is known of a request that runs."""

    __slots__ = ("allocated", "first_token", "local_hit", "request", "store_hit")

    def __init__(self, request: Request, now: float) -> None:
        stats = request.prefill_stats
        self.request = request
        self.allocated = now
        self.first_token: float | None = None
        self.local_hit = stats.num_local_cached_tokens if stats else 0
        self.store_hit = stats.num_external_cached_tokens if stats else 0


class Recorder:
    """Follows requests from allocation to their end, and hands them to a writer.

    Args:
        writer: Writes them.
        block_tokens: Tokens per hash id; a multiple of the hash block.
        hash_tokens: Tokens per block hash.
        start_ms: When the recording began, in ms since 1970.
    """

    def __init__(
        self,
        writer: RecordingWriter,
        block_tokens: int,
        hash_tokens: int,
        start_ms: int,
    ) -> None:
        self.writer = writer
        self._block_tokens = block_tokens
        self._hash_tokens = hash_tokens
        self._start_ms = start_ms
        self._seen: dict[str, _Seen] = {}
        # Those that have no token yet.
        self._prefilling: dict[str, _Seen] = {}

    def allocated(self, request: Request) -> None:
        """Take note that a request got blocks; more than once for one that loads."""
        if request.request_id not in self._seen:
            seen = _Seen(request, time.time())
            self._seen[request.request_id] = self._prefilling[request.request_id] = seen

    def step(self) -> None:
        """Take the time of first tokens. Called once a step, before it."""
        if not self._prefilling:
            return
        now = 0.0
        for req_id in list(self._prefilling):
            seen = self._prefilling[req_id]
            if seen.request.num_output_tokens:
                now = now or time.time()
                seen.first_token = now
                del self._prefilling[req_id]

    def finished(self, request: Request) -> None:
        """Record a request that ends."""
        seen = self._seen.pop(request.request_id, None)
        self._prefilling.pop(request.request_id, None)
        if seen is None or request.prompt_token_ids is None:
            return
        num_tokens = request.num_prompt_tokens
        if request.num_computed_tokens < num_tokens:
            return
        if seen.first_token is None and request.num_output_tokens:
            seen.first_token = time.time()
        hashes, rest = self._hashes(request.block_hashes, num_tokens)
        if hashes:
            self.writer.add(Finished(self._line(request, seen), hashes, rest))

    def _hashes(self, found: list[Any], num_tokens: int) -> tuple[list[bytes], int]:
        """Return a hash for each block of a prompt, and the tokens of its rest."""
        step = self._block_tokens // self._hash_tokens
        num_units = num_tokens // self._hash_tokens
        if len(found) < num_units:
            # Prefix caching is off.
            return [], 0
        hashes = found[step - 1 : num_units : step]
        rest = num_tokens % self._block_tokens
        if rest:
            hashes.append(found[num_units - 1] if num_units else b"")
        return hashes, rest

    def _line(self, request: Request, seen: _Seen) -> RecordedRequest:
        first = seen.first_token
        arrival = request.arrival_time
        return RecordedRequest(
            timestamp=max(round(arrival * 1000) - self._start_ms, 0),
            input_length=request.num_prompt_tokens,
            output_length=request.num_output_tokens,
            hash_ids=[],
            local_hit=seen.local_hit,
            store_hit=seen.store_hit,
            ttft_ms=None if first is None else round((first - arrival) * 1000, 1),
            prefill_ms=None
            if first is None
            else round((first - seen.allocated) * 1000, 1),
        )


def make_recorder(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, scheduler: Any
) -> Recorder:
    """Start a recording.

    Args:
        vllm_config: The engine's.
        kv_cache_config: Likewise.
        scheduler: The connector's scheduler side, stock's or ours.
    """
    config = JunctionsConfig.of(vllm_config)
    assert config.junctions_record is not None
    ids = IdMaker(config.junctions_record_secret)
    header = _header(vllm_config, kv_cache_config, scheduler, ids, config)
    where = Path(config.junctions_record)
    if header.engine:
        where = where.with_name(f"{where.stem}.{header.engine}{where.suffix}")
    writer = RecordingWriter(where, header, ids)
    if not writer.is_over:
        logger.info("vllm-junctions records traffic, without text, to %s", writer.path)
    return Recorder(
        writer, header.block_tokens, header.layout.hash_block_tokens, header.start_ms
    )


def _header(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    scheduler: Any,
    ids: IdMaker,
    config: JunctionsConfig,
) -> Header:
    speculative = vllm_config.speculative_config
    layout = layout_of(
        scheduler._store_coord,
        name=Path(vllm_config.model_config.model).name or "model",
        block_bytes=block_bytes_of(kv_cache_config),
        speculative=speculative.method if speculative else None,
    )
    return Header(
        junctions_recording=FORMAT_VERSION,
        block_tokens=layout.grain_tokens,
        start_ms=now_ms(),
        id_space=ids.space(getattr(kv_cache_utils, "NONE_HASH", b"")),
        layout=layout,
        engine=_engine_name(vllm_config),
        junctions=config.junctions,
        predicted_tails=config.junctions_predict if config.junctions else 0,
        local_blocks=kv_cache_config.num_blocks,
        version=__version__,
        vllm_version=vllm_version(),
    )


def _engine_name(vllm_config: VllmConfig) -> str:
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return f"dp{parallel.data_parallel_rank}"
    return ""


class _Recording:
    """What a store connector does besides, to record the requests it sees finish."""

    _recorder: Recorder | None = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        base: Any = super()
        base.__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            assert kv_cache_config is not None
            scheduler = cast(Any, self).connector_scheduler
            if scheduler._store_coord is None:
                logger.warning(
                    "vllm-junctions records nothing: the instance only lends memory "
                    "to the store."
                )
                return
            self._recorder = make_recorder(vllm_config, kv_cache_config, scheduler)

    def update_state_after_alloc(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> None:
        """Update state after block allocation, and take note of the request."""
        self._note(Recorder.allocated, request)
        cast(Any, super()).update_state_after_alloc(request, *args, **kwargs)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Build the step's metadata, and take the time of first tokens."""
        self._note(Recorder.step)
        return cast(Any, super()).build_connector_meta(scheduler_output)

    def request_finished_all_groups(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> Any:
        """Tell the connector that a request ends, and record it."""
        self._note(Recorder.finished, request)
        parent = cast(Any, super())
        return parent.request_finished_all_groups(request, *args, **kwargs)

    def shutdown(self) -> None:
        """Release connector resources, and write what waits to be recorded."""
        if self._recorder is not None:
            self._recorder.writer.close()
        cast(Any, super()).shutdown()

    def _note(self, take: Callable[..., None], *args: Any) -> None:
        if self._recorder is None:
            return
        try:
            take(self._recorder, *args)
        except Exception:
            logger.exception(
                "vllm-junctions stops recording traffic; what was recorded stays."
            )
            recorder, self._recorder = self._recorder, None
            recorder.writer.close()


@functools.cache
def recording(connector_cls: type) -> type:
    """Return a subclass of a store connector that records, under the same name."""
    return type(connector_cls.__name__, (_Recording, connector_cls), {})

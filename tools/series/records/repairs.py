# SPDX-License-Identifier: Apache-2.0
"""Repairs of faults that hits from the store bring about: each alone, droppable."""

from tools.series.edits import Commit, Edit

_STORE = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store"
_STORE_SCHEDULER = f"{_STORE}/scheduler.py"
_WORKER = f"{_STORE}/worker.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_UNIT = "tests/v1/kv_connector/unit"

PADDING = Commit(
    name="padding",
    message="""\
[Bugfix][KVConnector] Mooncake store: do not save a step's padding rows

A request that enters with one token to compute gets draft rows as padding under
speculative decoding. They are scheduled but hold no token: a save that counts
them can reach the end of a block and stores its KV under the hash of tokens that
are sampled later. Count no more than the prefill has.
""",
    edits=(
        Edit(
            _STORE_SCHEDULER,
            at="prefill_tokens = _new_req_prefill_tokens(request)",
            how="after",
            put="""\
            # Draft rows that pad the step are no tokens to save.
            num_tokens_to_compute = min(num_tokens_to_compute, len(prefill_tokens))
""",
        ),
        Edit(
            _STORE_SCHEDULER,
            at="prefill_tokens = list(request_real.all_token_ids)",
            how="after",
            put="""\
                    num_tokens_to_compute = min(
                        num_tokens_to_compute, len(prefill_tokens)
                    )
""",
        ),
    ),
    new_files=(f"{_UNIT}/test_mooncake_store_padding.py",),
)

RESERVATION = Commit(
    name="reservation",
    message="""\
[Bugfix][Core] A failed KV load's request reserves nothing any more

A request whose load failed gives its blocks back but stays among the in-flight
prefills, whose remaining blocks are kept free. Its next attempt has to fit beside
its own reservation: a request of more than half of the KV cache waits for itself
for ever.
""",
    edits=(
        Edit(
            _SCHEDULER,
            at="self.kv_cache_manager.free(request)",
            within="def _update_waiting_for_remote_kv(",
            how="after",
            put="""\
                # It starts anew: reserve nothing for the attempt that failed.
                self._inflight_prefills.discard(request)
""",
        ),
    ),
    new_files=(f"{_UNIT}/test_failed_load_reservation.py",),
)

RESETS = Commit(
    name="resets",
    message="""\
[Bugfix][KVConnector] Mooncake store: survive resets that preempt and resume

A forced reset of the prefix cache (``/pause?mode=keep``) preempts requests
outside of a scheduling pass; the next pass resumes them and reports the
preemption in the same output. The store's scheduler then dropped what it had just
noted for the resumed run: the engine died on a missing entry, or a load was never
issued and its request waited for ever. Drop only what no new run has taken over.
""",
    edits=(
        Edit(
            _STORE_SCHEDULER,
            at="self.load_specs: dict",
            how="before",
            put="""\
        # Allocated since the last step's metadata was built.
        self._allocated_ids: set[str] = set()
""",
        ),
        Edit(
            _STORE_SCHEDULER,
            at="self._unfinished_request_ids.add(request.request_id)",
            how="after",
            put="        self._allocated_ids.add(request.request_id)\n",
        ),
        Edit(
            _STORE_SCHEDULER,
            at="self.load_specs.pop(req_id, None)",
            within="for req_id in preempted_ids:",
            put="""\
if req_id not in self._allocated_ids:
                self.load_specs.pop(req_id, None)
                self._unfinished_requests.pop(req_id, None)""",
        ),
        Edit(
            _STORE_SCHEDULER,
            at="            self._unfinished_requests.pop(req_id, None)\n\n",
            put="        self._allocated_ids.clear()\n\n",
        ),
        Edit(
            f"{_UNIT}/test_mooncake_store_scheduler.py",
            at="scheduler.load_specs = {}",
            how="before",
            put="    scheduler._allocated_ids = set()\n",
        ),
    ),
    new_files=(f"{_UNIT}/test_mooncake_store_resets.py",),
)

LOOKUPS = Commit(
    name="lookups",
    message="""\
[KVConnector] Mooncake store: bound and check lookup answers

The scheduler waits for a lookup's answer. A worker that does not answer, or whose
lookup thread an exception has ended, stops the engine for good. Wait no longer
than ``lookup_timeout_ms`` (default 2000) and then pause lookups for four times as
long; let an exception cost the hit rather than the thread; and take no answer that
cannot be the request's.
""",
    edits=(
        Edit(
            _WORKER,
            at="result = self.store_worker.lookup(num_tokens, block_hashes)",
            put="result = self._lookup(num_tokens, block_hashes)",
        ),
        Edit(
            _WORKER,
            at="    def close(self):",
            within="class LookupKeyServer:",
            how="before",
            put='''\
    def _lookup(
        self, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> MooncakeLookupResult:
        """Look up; whatever goes wrong costs the hit, not the thread."""
        try:
            return self.store_worker.lookup(num_tokens, block_hashes)
        except Exception:
            logger.exception("Mooncake lookup failed and counts as no hit")
            return MooncakeLookupResult(0)

''',
        ),
        Edit(
            _WORKER,
            at="# Async lookup support",
            within="class LookupKeyClient:",
            how="before",
            put="""\
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None
        settings = transfer_config.kv_connector_extra_config
        self._timeout_ms = int(settings.get("lookup_timeout_ms", 2000))
        self._socket_path = socket_path
        self._paused_until = 0.0

""",
        ),
        Edit(
            _WORKER,
            at="    def _lookup(",
            within="class LookupKeyClient:",
            how="before",
            put='''\
    def _receive_lookup(self) -> bytes:
        """Wait for an answer, or pause lookups when none comes in time."""
        if self.socket.poll(self._timeout_ms):
            return self.socket.recv()
        self._paused_until = time.monotonic() + 4 * self._timeout_ms / 1000
        # A REQ socket that is owed an answer cannot ask again.
        self.socket.close(linger=0)
        self.socket = make_zmq_socket(self.ctx, self._socket_path, zmq.REQ, bind=False)
        raise TimeoutError(f"no answer within {self._timeout_ms} ms")

''',
        ),
        Edit(
            _WORKER,
            at="hash_len = len(block_hashes[0])",
            within="class LookupKeyClient:",
            how="before",
            put="""\
        if time.monotonic() < self._paused_until:
            raise TimeoutError("lookups are paused")
""",
        ),
        Edit(
            _WORKER,
            at="resp = self.socket.recv()\n        return decode_lookup_response(resp)",
            put="""\
result = decode_lookup_response(self._receive_lookup())
        hit = result.hit_length
        # The last token is always computed; tails lie at the hit or just above.
        if hit and not (
            hit < num_tokens
            and all(
                hit <= tail.num_tokens <= num_tokens
                for tail in result.tail_key_boundaries
            )
        ):
            raise ValueError(f"{result} is no answer for {num_tokens} tokens")
        return result""",
        ),
    ),
    new_files=(f"{_UNIT}/test_mooncake_store_lookup_answers.py",),
)

COMMITS = (PADDING, RESERVATION, RESETS, LOOKUPS)

# SPDX-License-Identifier: Apache-2.0
"""The bugs that ``make mutants`` plants."""

from dataclasses import dataclass

# One of these has to catch a bug that names no others.
TESTS = (
    "tests/engine/test_field_bugs.py",
    "tests/engine/test_mamba.py",
    "tests/engine/test_faults.py",
)
FIRST_SIBLING_TESTS = ("tests/engine/test_first_siblings.py",)
MARK_TESTS = ("tests/unit/declared/test_hooks.py", "tests/unit/declared/test_marks.py")
RECORD_TESTS = ("tests/unit/record/test_writer.py",)
PLAN_TESTS = ("tests/unit/plan/test_replay.py", "tests/engine/test_plan.py")
LOOKUP_TESTS = (
    "tests/unit/rules/test_tails.py",
    "tests/unit/lookup/two_phase/test_search.py",
    "tests/property/test_lookups.py",
)


@dataclass(frozen=True)
class Mutation:
    """One planted bug.

    Attributes:
        name: What it does, in words.
        file: File in the package.
        old: Text that is there exactly once.
        new: Text that takes its place.
        tests: What has to catch it: one of the tests in these files.
        faults: Tests of failing stores that this takes the protection from: each of
            them has to fail, run by itself. They take the place of ``tests``.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = TESTS
    faults: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[tuple[str, ...], ...]:
        """What pytest is given, run by run; each run has to fail."""
        return tuple((fault,) for fault in self.faults) or (self.tests,)


_BOX = "tests/engine/test_faults.py::test_"
_REAL = "tests/engine/test_real_store.py::test_"
_SERVER = "tests/e2e/test_faults.py::test_"
_LATE = "tests/e2e/test_late_transfers.py::test_"
_LANDED = "tests/unit/repairs/test_late_loads.py::test_"
_IMPORTS_END = "logger = init_logger(__name__)\n"
_STOCK_WORKER = (
    _IMPORTS_END + "\n\n"
    "import vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker "
    "as _stock\n\n"
)

MUTATIONS = (
    Mutation(
        "skip the null-block check",
        "store/worker.py",
        _IMPORTS_END,
        _STOCK_WORKER + "_stock.NULL_BLOCK_ID = -1\n",
    ),
    Mutation(
        "drop the proof block",
        "store/coordinator.py",
        "            tails = super().store_mask(\n"
        "                aligned_token_len,\n"
        "                start_token,\n"
        "                self._prompt_replaying_at(position),\n"
        "            )\n",
        "            eagle, self.eagle_group_ids = self.eagle_group_ids, set()\n"
        "            tails = super().store_mask(\n"
        "                aligned_token_len,\n"
        "                start_token,\n"
        "                self._prompt_replaying_at(position),\n"
        "            )\n"
        "            self.eagle_group_ids = eagle\n",
    ),
    Mutation(
        "reuse a freed block: no pins while a save waits",
        "store/scheduler.py",
        "        assert isinstance(meta, MooncakeStoreConnectorMetadata)\n",
        "        assert isinstance(meta, MooncakeStoreConnectorMetadata)\n"
        "        pool = self._gpu_block_pool\n"
        "        for block_ids, _ in self._pinned_saves.values():\n"
        "            pool.free_blocks([pool.blocks[i] for i in block_ids])\n"
        "        self._pinned_saves.clear()\n",
    ),
    Mutation(
        "use the scalar instead of the tuple",
        "core/request.py",
        "    return found\n\n\ndef set_junctions(",
        "    return found[-1:]\n\n\ndef set_junctions(",
    ),
    Mutation(
        "forget junctions on resume",
        "store/scheduler.py",
        "        self._junction_tracker.discard(scheduler_output.finished_req_ids)\n",
        "        self._junction_tracker.discard(scheduler_output.finished_req_ids)\n"
        "        self._junction_tracker.discard(scheduler_output.preempted_req_ids "
        "or ())\n",
    ),
    Mutation(
        "EAGLE: keep the upper position only",
        "rules/boundaries.py",
        "    if use_eagle:\n"
        "        positions.insert(0, longest_hit_length - scheduler_block_size)\n",
        "",
    ),
    Mutation(
        "keep junctions locally, store nothing there",
        "store/scheduler.py",
        "            self._junction_tracker.get(req_meta.req_id),\n",
        "            (),\n",
    ),
    Mutation(
        "ignore what the store reports",
        "store/scheduler.py",
        "            set_junctions(request, store=junctions)\n",
        "            set_junctions(request, store=())\n",
    ),
    Mutation(
        "no Mamba stop at junctions but the last",
        "core/mamba_chunks.py",
        "            for stop in stops\n",
        "            for stop in stops[-1:]\n",
    ),
    Mutation(
        "stop Mamba chunks before siblings that enter with them",
        "core/mamba_chunks.py",
        "lambda position: not _a_sibling_waits(self, request, position)",
        "lambda position: True",
        ("tests/engine/test_repairs.py",),
    ),
    Mutation(
        "let declared positions take the stops of found ones",
        "rules/boundaries.py",
        "        stops += more[-room:] if room > 0 else []\n",
        "        stops = [*stops, *more][-2:]\n",
        FIRST_SIBLING_TESTS,
    ),
    Mutation(
        "declare without room for the proof block",
        "rules/declared.py",
        "(entry - proof_tokens) // scheduler_block_size",
        "entry // scheduler_block_size",
        FIRST_SIBLING_TESTS,
    ),
    Mutation(
        "take a request that resumes for a sibling of itself",
        "store/first_siblings.py",
        "if request.request_id in self._extra_by_request:\n",
        "if False:\n",
        FIRST_SIBLING_TESTS,
    ),
    Mutation(
        "place predicted tails on top of four declared ones",
        "store/first_siblings.py",
        "self._placement.place(seen, MAX_TAILS - len(declared))",
        "self._placement.place(seen)",
        FIRST_SIBLING_TESTS,
    ),
    Mutation(
        "whoever waits with blocks gives them back, sessions that wait for input too",
        "repairs/loads_wait.py",
        "        refused = getattr(manager, _REFUSED)\n"
        "        if refused is not None and not output.total_num_scheduled_tokens:\n"
        "            giver = _who_gives_back(self, refused)\n",
        "        holders = [r for r in self.kv_holding_waiting "
        "if r.num_computed_tokens]\n"
        "        if not output.total_num_scheduled_tokens and not self.running:\n"
        "            giver = holders[-1] if len(holders) > 1 else None\n",
        faults=(
            "tests/engine/test_repairs.py::"
            "test_waiting_sessions_keep_their_context_however_long_a_save_takes",
            "tests/property/test_never_worse.py::test_never_worse",
        ),
    ),
    Mutation(
        "keep what failed of a request that ended",
        "seams/outcomes.py",
        "    return failed & store_scheduler._unfinished_request_ids\n",
        "    return failed\n",
        ("tests/engine/test_repairs.py",),
    ),
    Mutation(
        "junctions of local lookups in every engine of the process",
        "core/managers.py",
        "        if is_on(self, JUNCTIONS):\n",
        "        if True:\n",
        ("tests/engine/test_neighbours.py",),
    ),
    Mutation(
        "hooks on in dense retention",
        "overlay/gain.py",
        "    if dense and not any(_is_mamba(spec) for spec in sparse):\n",
        "    if False:\n",
        ("tests/unit/overlay/test_drop_in.py",),
    ),
    Mutation(
        "wait for lookups without a bound",
        "repairs/silent_lookups.py",
        "        socket.setsockopt(option, timeout_ms)\n",
        "        socket.setsockopt(option, _WITHOUT_BOUND)\n",
        faults=(_BOX + "a_silent_lookup_channel_costs_hits_and_recovers",),
    ),
    Mutation(
        "wait the full time behind a silent server, again and again",
        "repairs/patience.py",
        "        return self._pause > 0 and self._clock() < self._paused_until\n",
        "        return False\n",
    ),
    Mutation(
        "never ask a silent server again",
        "repairs/patience.py",
        "        return self._pause > 0 and self._clock() < self._paused_until\n",
        "        return self._pause > 0\n",
    ),
    Mutation(
        "keep the socket of a lookup that was given up",
        "repairs/silent_lookups.py",
        "            _replace_socket(self)\n",
        "",
    ),
    Mutation(
        "take hits that end within a block",
        "store/scheduler.py",
        "            else self._block_size,\n",
        "            else self._hash_block_size,\n",
        faults=(_BOX + "a_hit_within_a_block_does_not_end_in_an_endless_wait",),
    ),
    Mutation(
        "offer a hit again however often its load failed",
        "repairs/endless_loads.py",
        "get(request.request_id, 0) < MAX_FAILED_LOADS:\n",
        "get(request.request_id, 0) < 1 << 30:\n",
        faults=(_BOX + "a_key_that_exists_but_never_loads",),
    ),
    Mutation(
        "overlook loads that fail by block",
        "seams/outcomes.py",
        "        failed |= {\n",
        "        _ = {\n",
        ("tests/unit/store/test_scheduler.py",),
    ),
    Mutation(
        "give up the store after the first failed load",
        "repairs/endless_loads.py",
        "MAX_FAILED_LOADS = 2\n",
        "MAX_FAILED_LOADS = 1\n",
    ),
    Mutation(
        "leave a failed save's junctions to the next save",
        "store/sender.py",
        "        self._job = self.coord.job = SaveJob(req_meta, self)\n"
        "        super()._handle_request(req_meta)\n",
        "        job = SaveJob(req_meta, self)\n"
        "        if job.boundaries:\n"
        "            self._job = self.coord.job = job\n"
        "        super()._handle_request(req_meta)\n"
        "        self._job = self.coord.job = None\n",
        faults=(_BOX + "a_store_that_raises_on_a_save_spoils_no_later_one",),
    ),
    Mutation(
        "take a part of a tail for the whole",
        "lookup/two_phase/tails.py",
        "window.count(PRESENT) == end - first",
        "PRESENT in window",
        LOOKUP_TESTS,
    ),
    Mutation(
        "believe the first rank's answer for all",
        "lookup/two_phase/asked_keys.py",
        "done = PRESENT if all_ranks or len(stems) == 1 else FIRST",
        "done = PRESENT",
        LOOKUP_TESTS,
    ),
    Mutation(
        "let a later rank's yes overrule an earlier one's no",
        "lookup/two_phase/asked_keys.py",
        "                    elif states[unit] == ASKED:\n",
        "                    else:\n",
        LOOKUP_TESTS,
    ),
    Mutation(
        "forget that vLLM aligns a hit before it drops the proof block",
        "rules/tails.py",
        "        if length < self.num_blocks[drop]:\n"
        "            length -= length % self.step\n",
        "",
        LOOKUP_TESTS,
    ),
    Mutation(
        "let what disproves another group's tail go on for the longest hit",
        "lookup/two_phase/search.py",
        "    pool.tails.skips_positions = False\n",
        "",
        LOOKUP_TESTS,
    ),
    Mutation(
        "take a hit of the whole prompt",
        "lookup/two_phase/search.py",
        "    if hit_length >= num_tokens:\n",
        "    if hit_length > num_tokens:\n",
        LOOKUP_TESTS,
    ),
    Mutation(
        "let a failed load go unreported",
        "store/worker.py",
        _IMPORTS_END,
        _STOCK_WORKER
        + "_stock.KVCacheStoreRecvingThread._report_load_error = lambda *_: None\n",
        faults=(
            _BOX + "a_tail_evicted_between_lookup_and_load",
            _BOX + "a_key_that_exists_but_never_loads",
            _BOX + "a_value_of_the_wrong_size_is_never_loaded_as_kv",
            _REAL + "a_value_of_the_wrong_size_is_never_loaded_as_kv",
            _REAL + "a_master_that_dies_costs_hits_until_it_is_back[during a load]",
            _SERVER + "an_instance_killed_while_another_loads_from_it",
        ),
    ),
    Mutation(
        "keep the blocks of a save that failed",
        "store/sender.py",
        "    def _record_saved(self, req_meta: ReqMeta, token_len: int) -> None:\n"
        "        super()._record_saved(req_meta, token_len)\n",
        "    _saved_id: int | None = None\n\n"
        "    def finish_store_job(self, req_meta: ReqMeta) -> None:\n"
        "        if self._saved_id == req_meta.store_job_id:\n"
        "            super().finish_store_job(req_meta)\n\n"
        "    def _record_saved(self, req_meta: ReqMeta, token_len: int) -> None:\n"
        "        self._saved_id = req_meta.store_job_id\n"
        "        super()._record_saved(req_meta, token_len)\n",
        faults=(
            _BOX + "a_full_store_skips_saves_and_leaves_hits_alone",
            _REAL + "a_master_that_dies_costs_hits_until_it_is_back[during a save]",
        ),
    ),
    Mutation(
        "read an error code of the store as yes",
        "lookup/two_phase/asked_keys.py",
        "                    if answer != 1:\n",
        "                    if answer == 0:\n",
        faults=(
            _REAL + "a_master_that_dies_costs_hits_until_it_is_back[before a lookup]",
            _SERVER + "a_master_that_dies_and_comes_back",
        ),
    ),
    Mutation(
        "leave a failed load's memory reserved",
        "repairs/load_reservation.py",
        "            self._inflight_prefills.discard(request)\n",
        "            pass\n",
        faults=(_BOX + "a_large_request_whose_load_failed_does_not_wait_for_itself",),
    ),
    Mutation(
        "read straight into KV blocks",
        "repairs/late_loads/__init__.py",
        "        thread.store = LandingStore(thread.store, memory, blocks, report)\n",
        "        pass\n",
        faults=(_LATE + "nothing_comes_after_a_load_that_was_given_up",),
    ),
    Mutation(
        "read again into memory that a load was given up in",
        "repairs/late_loads/store.py",
        "        self._memory.set_aside(run)\n        self._run = None\n",
        "",
        faults=(_LANDED + "what_comes_after_a_load_was_given_up_meets_nobody",),
    ),
    Mutation(
        "take a load for over because Mooncake says that it failed",
        "repairs/late_loads/store.py",
        "            is_over = min(done) >= 0 or seconds < _SURELY_OVER_SECONDS\n",
        "            is_over = True\n",
        faults=(_LANDED + "what_comes_after_a_load_was_given_up_meets_nobody",),
    ),
    Mutation(
        "set memory aside for every transfer that failed",
        "repairs/late_loads/store.py",
        "            is_over = min(done) >= 0 or seconds < _SURELY_OVER_SECONDS\n",
        "            is_over = min(done) >= 0\n",
        faults=(_LANDED + "a_peer_that_is_gone_uses_nothing_up",),
    ),
    Mutation(
        "copy what landed whatever Mooncake says of it",
        "repairs/late_loads/store.py",
        "            if code == num_bytes:\n",
        "            if True:\n",
        faults=(
            _LANDED + "nothing_of_a_key_that_failed_reaches_its_block",
            _LANDED + "a_value_of_another_size_fails_as_in_mooncake",
        ),
    ),
    Mutation(
        "unmap memory that may still be written to",
        "repairs/late_loads/landing.py",
        "                self._kept.append(self)\n",
        "                pass\n",
        faults=(_LANDED + "what_is_set_aside_stays_mapped_and_the_rest_does_not",),
    ),
    Mutation(
        "put all blocks of a save in one call",
        "repairs/short_puts.py",
        "MAX_TRANSFERS = 512\n",
        "MAX_TRANSFERS = 1 << 30\n",
        faults=(_LATE + "a_long_save_does_not_overflow_mooncakes_queue",),
    ),
    Mutation(
        "let loaded requests keep what others wait for",
        "repairs/loads_wait.py",
        "                _give_back(self, giver)\n",
        "                pass\n",
        ("tests/engine/test_box.py",),
    ),
    Mutation(
        "a mark counts tokens that the prompt has not",
        "declared/reader.py",
        "num_common_tokens(await self._tokenize(text), token_ids)",
        "len(await self._tokenize(text))",
        MARK_TESTS,
    ),
    Mutation(
        "a mark is looked for behind white space that templates trim",
        "declared/marks.py",
        "    kept = text.rstrip()\n",
        "    kept = text\n",
        MARK_TESTS,
    ),
    Mutation(
        "a mark counts where its text depends on what follows",
        "declared/marks.py",
        "len(before) if text.startswith(before) else MarkOutcome.DIFFERS",
        "len(before)",
        MARK_TESTS,
    ),
    Mutation(
        "a text is known by its letters alone, whatever tokens a prompt cut it into",
        "declared/positions.py",
        "        if hash(tuple(prompt_token_ids[:num_tokens])) != tokens_hash:\n"
        "            return None\n",
        "",
        ("tests/unit/declared/test_positions.py",),
    ),
    Mutation(
        "marks write into parameters that serve other requests",
        "declared/hooks.py",
        "    params = copy.copy(params)\n",
        "    copy.copy(params)\n",
        MARK_TESTS,
    ),
    Mutation(
        "marks are read for engines with other connectors",
        "declared/hooks.py",
        "    if not marked or not reads_marks(renderer.config.kv_transfer_config):\n",
        "    if not marked:\n",
        MARK_TESTS,
    ),
    Mutation(
        "a template that fails on probes fails the request",
        "declared/hooks.py",
        "        except Exception as error:\n",
        "        except KeyError as error:\n",
        MARK_TESTS,
    ),
    Mutation(
        "a fault of the recording ends the engine",
        "record/connector.py",
        "            take(self._recorder, *args)\n        except Exception:\n",
        "            take(self._recorder, *args)\n        except OSError:\n",
        ("tests/engine/test_record.py",),
    ),
    Mutation(
        "ids of different recordings can be compared",
        "record/writer.py",
        "        key = secrets.token_bytes(32)\n",
        "        key = bytes(32)\n",
        RECORD_TESTS,
    ),
    Mutation(
        "a recording without a bound",
        "record/writer.py",
        "            if num_bytes + len(line) > self._max_bytes:\n",
        "            if False:\n",
        RECORD_TESTS,
    ),
    Mutation(
        "a plan without EAGLE's proof block",
        "plan/replay.py",
        "        self._eagle = layout.drops_eagle_block\n",
        "        self._eagle = False\n",
        PLAN_TESTS,
    ),
)

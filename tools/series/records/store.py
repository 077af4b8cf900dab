# SPDX-License-Identifier: Apache-2.0
"""Commit 2: lookups of the Mooncake store report junctions, saves keep their tails."""

from tools.series.edits import Commit, Edit

_STORE = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store"
_COORDINATOR = f"{_STORE}/coordinator.py"
_DATA = f"{_STORE}/data.py"
_PROTOCOL = f"{_STORE}/protocol.py"
_SCHEDULER = f"{_STORE}/scheduler.py"
_WORKER = f"{_STORE}/worker.py"

_PROTOCOL_EDITS = (
    Edit(
        _PROTOCOL,
        at="(u32), then boundary_tokens (u32).",
        how="after",
        put="""\
                  Entries whose group_id is JUNCTION_GROUP_ID come last: no group
                  has that id, so readers that do not know junctions skip them.
                  Their tokens are where siblings of the prompt part.
""",
    ),
    Edit(
        _PROTOCOL,
        at="TAIL_KEY_BOUNDARY_ENTRY_SIZE: int",
        how="after",
        put="""\
# The largest u32: marks a shared-prefix junction.
JUNCTION_GROUP_ID: int = 0xFFFFFFFF
""",
    ),
    Edit(
        _PROTOCOL,
        at="if not result.tail_key_boundaries:",
        put="""\
entries = [*result.tail_key_boundaries]
    entries += [TailKeyBoundary(JUNCTION_GROUP_ID, n) for n in result.junctions]
    if not entries:""",
    ),
    Edit(
        _PROTOCOL,
        at="in result.tail_key_boundaries:",
        within="payload = bytearray",
        put="in entries:",
    ),
    Edit(
        _PROTOCOL,
        at="return MooncakeLookupResult(hit_length, tuple(boundaries))",
        put="""\
return MooncakeLookupResult(
        hit_length,
        tuple(b for b in boundaries if b.group_id != JUNCTION_GROUP_ID),
        tuple(b.num_tokens for b in boundaries if b.group_id == JUNCTION_GROUP_ID),
    )""",
    ),
)

_DATA_EDITS = (
    Edit(
        _DATA,
        at="There is one entry per group for every",
        how="after",
        put="""\
        junctions: Positions above the hit where siblings of the prompt part,
            ascending; the request keeps and stores its sparse groups' state there.
""",
    ),
    Edit(
        _DATA,
        at="= ()",
        within="class MooncakeLookupResult:",
        how="after",
        put="    junctions: tuple[int, ...] = ()\n",
    ),
    Edit(
        _DATA,
        at="publish_partial_tail: bool = False",
        how="after",
        put="""\
    # Shared-prefix junctions of the request: their tails are stored as well.
    junctions: tuple[int, ...] = ()
""",
    ),
)

_COORDINATOR_EDITS = (
    Edit(
        _COORDINATOR,
        at="kv_cache_coordinator import replay_boundaries",
        put="""\
kv_cache_coordinator import (
    junction_boundaries,
    replay_boundaries,
)""",
    ),
    Edit(
        _COORDINATOR,
        at="    def load_mask(",
        how="before",
        put='''\
    def find_junctions(
        self,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        hit_length: int,
        cached_block_pool: ExternalCachedBlockPool,
    ) -> tuple[int, ...]:
        """Where siblings of this prompt part, above its joint hit.

        Full attention alone tells (without any, each group): a sparse tail above
        what it reaches helps nobody before the blocks below it are back.
        """
        num_hashed_tokens = len(block_hashes) * self.hash_block_size
        dense = [
            group
            for group in self.attention_groups
            if isinstance(group.spec, FullAttentionSpec)
        ]
        longest = 0
        for spec, group_ids, manager_cls, use_eagle in dense or self.attention_groups:
            proof = self.eagle_proof_margin_by_group.get(group_ids[0], 0)
            _, length = manager_cls.find_longest_cache_hit(
                block_hashes=block_hashes,  # type: ignore[arg-type]
                max_length=min(max_length + proof, num_hashed_tokens),
                kv_cache_group_ids=group_ids,
                block_pool=cast(BlockPool, cached_block_pool),
                kv_cache_spec=spec,
                drop_eagle_block=use_eagle,
                alignment_tokens=(
                    self.hash_block_size
                    if self.enable_partial_hash_hits
                    else self.lcm_block_size
                ),
            )
            longest = max(longest, length)
        return junction_boundaries(
            hit_length,
            longest,
            self.lcm_block_size,
            use_eagle=bool(self.eagle_group_ids),
        )

''',
    ),
    Edit(
        _COORDINATOR,
        at="num_prompt_tokens: int | None = None,",
        within="def store_mask(",
        how="after",
        put="        junctions: Sequence[int] = (),\n",
    ),
    Edit(
        _COORDINATOR,
        at="``None`` is the all-True sentinel for the suffix.",
        how="after",
        put="        The tails at ``junctions`` are kept as a replay boundary's are.\n",
    ),
    Edit(
        _COORDINATOR,
        at="num_prompt_tokens=num_prompt_tokens,",
        how="after",
        put="            junctions=junctions,\n",
    ),
    Edit(
        _COORDINATOR,
        at="exclude_mamba: bool = False,",
        how="after",
        put="        junctions: Sequence[int] = (),\n",
    ),
    Edit(
        _COORDINATOR,
        at="reachable_boundaries=reachable_boundaries,",
        put="reachable_boundaries=(*reachable_boundaries, *junctions),",
    ),
)

_WORKER_EDITS = (
    Edit(
        _WORKER,
        at="            ),\n        )",
        within="return MooncakeLookupResult(\n",
        put="""\
            ),
            self.coord.find_junctions(
                block_hashes,
                self.coord.align_lookup_length(num_tokens - 1),
                hit_length,
                cached_block_pool,
            ),
        )""",
    ),
    Edit(
        _WORKER,
        at="num_prompt_tokens=req_meta.prefill_end_tokens,",
        how="after",
        put="                junctions=req_meta.junctions,\n",
    ),
)

_SCHEDULER_EDITS = (
    Edit(
        _SCHEDULER,
        at="self._request_trackers: dict",
        how="after",
        put="""\
        # Every junction a request has had: its tails are still to be stored when
        # the request resumes, and its own tuple is derived anew then.
        self._junctions: dict[str, tuple[int, ...]] = {}
""",
    ),
    Edit(
        _SCHEDULER,
        at="num_external_hit_tokens = lookup",
        how="before",
        put="""\
        # Before the request computes: cache managers decide as blocks fill.
        request.external_prefix_boundaries = tuple(
            junction
            for junction in lookup_result.junctions
            if 0 < junction <= request.num_tokens
        )
""",
    ),
    Edit(
        _SCHEDULER,
        at='"""Update state after block allocation."""',
        how="after",
        put="""\
        if boundaries := request.shared_prefix_boundaries:
            known = {*self._junctions.get(request.request_id, ()), *boundaries}
            self._junctions[request.request_id] = tuple(sorted(known))

""",
    ),
    Edit(
        _SCHEDULER,
        at="self.load_specs.pop(finished_req_id, None)",
        how="after",
        put="            self._junctions.pop(finished_req_id, None)\n",
    ),
    Edit(
        _SCHEDULER,
        at="self._apply_current_save_block_ids(meta",
        how="before",
        put="""\
        for req_meta in meta.requests:
            req_meta.junctions = self._junctions.get(req_meta.req_id, ())
""",
    ),
)

_UNIT = "tests/v1/kv_connector/unit"

# Stand-ins in vLLM's own tests that lack what the scheduler and the sender now read.
_TEST_EDITS = (
    Edit(
        f"{_UNIT}/test_mooncake_store_scheduler.py",
        at="scheduler._request_trackers = {}",
        how="after",
        put="    scheduler._junctions = {}\n",
    ),
    Edit(
        f"{_UNIT}/test_mooncake_store_scheduler.py",
        at='request_id="req-0",',
        within="def test_pending_load_for_non_chosen_connector_is_dropped",
        how="after",
        put="        shared_prefix_boundaries=(),\n",
    ),
    Edit(
        f"{_UNIT}/test_mooncake_store_scheduler.py",
        at='"req-1")',
        within="def test_update_state_excludes_nontransfer_groups",
        put='"req-1", shared_prefix_boundaries=())',
    ),
    Edit(
        f"{_UNIT}/test_mooncake_store_worker.py",
        at="num_prompt_tokens=None: (",
        how="everywhere",
        put="num_prompt_tokens=None, **_: (",
    ),
    Edit(
        f"{_UNIT}/test_mooncake_store_worker.py",
        at="(64, 32, num_prompt_tokens=64",
        put="(64, 32, num_prompt_tokens=64, junctions=()",
    ),
)

COMMIT = Commit(
    name="store",
    message="""\
[KVConnector] Mooncake store: keep tails where siblings part

Under sparse retention the store holds a prompt's sliding-window tails only where
the same prompt could resume. A sibling of that prompt finds all full-attention
blocks of the shared prefix and no tail at its end: it hits nothing, and so does
every later sibling.

The lookup now reports the junctions: where full attention reaches further than
the joint hit. The request that learns of one keeps its sparse groups' state
there while it recomputes, and the save includes the tails, so the next sibling
hits. On the wire a junction is one more boundary entry, under a group id that no
group has; readers without this change ignore it.
""",
    edits=(
        *_PROTOCOL_EDITS,
        *_DATA_EDITS,
        *_COORDINATOR_EDITS,
        *_WORKER_EDITS,
        *_SCHEDULER_EDITS,
        *_TEST_EDITS,
    ),
    new_files=("tests/v1/kv_connector/unit/test_mooncake_store_junctions.py",),
)

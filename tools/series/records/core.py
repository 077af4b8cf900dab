# SPDX-License-Identifier: Apache-2.0
"""Commit 1: several shared-prefix boundaries a request."""

from tools.series.edits import Commit, Edit

_REQUEST = "vllm/v1/request.py"
_COORDINATOR = "vllm/v1/core/kv_cache_coordinator.py"
_MANAGER = "vllm/v1/core/kv_cache_manager.py"
_GROUP_MANAGERS = "vllm/v1/core/single_type_kv_cache_manager.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"

_REQUEST_EDITS = (
    Edit(
        _REQUEST,
        at="# Block-aligned token position of",
        until="self.shared_prefix_boundary = 0",
        put="""\
# Token positions where siblings of this prompt part, ascending: those
        # that the local cache shows and those that a connector's store reports.
        # Sparse groups keep there what a later sibling needs to resume.
        self.local_prefix_boundaries: tuple[int, ...] = ()
        self.external_prefix_boundaries: tuple[int, ...] = ()""",
    ),
    Edit(
        _REQUEST,
        at="    def use_structured_output",
        how="instead",
        put="""\
    def shared_prefix_boundaries(self) -> tuple[int, ...]:
        \"\"\"All known shared-prefix boundaries, ascending and distinct.\"\"\"
        if not self.external_prefix_boundaries:
            return self.local_prefix_boundaries
        known = {*self.local_prefix_boundaries, *self.external_prefix_boundaries}
        return tuple(sorted(known))

    @property
    def prefill_stops(self) -> tuple[int, ...]:
        \"\"\"Boundaries at which a recurrent model's prefill chunks end: two at most.

        The longest local one comes first: requests of the same pass resume there.
        \"\"\"
        external = self.external_prefix_boundaries
        if not self.local_prefix_boundaries:
            return external[-2:]
        longest = self.local_prefix_boundaries[-1]
        return (longest, *[b for b in external if b > longest][-1:])

    @property
    def shared_prefix_boundary(self) -> int:
        \"\"\"The longest local one, for readers of a single position; 0 for none.\"\"\"
        return max(self.local_prefix_boundaries, default=0)

    @property
    def use_structured_output""",
    ),
)

_COORDINATOR_EDITS = (
    Edit(
        _COORDINATOR,
        at="class KVCacheCoordinator(ABC):",
        how="before",
        put='''\
def junction_boundaries(
    hit_length: int,
    longest_hit_length: int,
    scheduler_block_size: int,
    use_eagle: bool,
) -> tuple[int, ...]:
    """Positions above a joint hit where sparse groups should keep their state.

    ``longest_hit_length`` is how far a single group reaches: up to there the
    prompt was seen before. Under EAGLE a sibling that parts within the block
    above it cannot prove that position and resumes one scheduler block lower,
    so both are kept. With blocks of 256, hit 0 and longest 3840: (3584, 3840).
    """
    if longest_hit_length <= hit_length:
        return ()
    lower = longest_hit_length - scheduler_block_size
    if use_eagle and lower > hit_length:
        return (lower, longest_hit_length)
    return (longest_hit_length,)


''',
    ),
)

_MANAGER_EDITS = (
    Edit(
        _MANAGER,
        at="get_kv_cache_coordinator,",
        how="after",
        put="    junction_boundaries,\n",
    ),
    Edit(
        _MANAGER,
        at="self, request: Request)",
        within="def get_computed_blocks(",
        until="int]:",
        put="""
        self, request: Request
    ) -> tuple[KVCacheBlocks, int, tuple[int, ...]]:""",
        versions=("0.32.0",),
    ),
    Edit(
        _MANAGER,
        at="int]:",
        within="def get_computed_blocks(",
        put="tuple[int, ...]]:",
        versions=("0.33.0",),
    ),
    Edit(
        _MANAGER,
        at="``shared_prefix_boundary``: the",
        until="the junction and defeat cross-request reuse.",
        put="""\
Where siblings of this prompt part, ascending (see
                  ``junction_boundaries``): some group has cached the prefix up
                  to there, a sparse-retention group has not. Kept under sparse
                  retention, so that later siblings resume there.""",
    ),
    Edit(
        _MANAGER,
        at="0, 0\n",
        within="def get_computed_blocks(",
        put="0, ()\n",
    ),
    *(
        Edit(
            _MANAGER,
            at="# The junction to pin is where",
            until="        )\n",
            put=f"""\
# The longest single-group hit shows how far siblings agree. Sub-block
        # gaps are left to the mask, which floors to the alignment.
        boundaries = junction_boundaries(
            num_new_computed_tokens,
            num_new_computed_tokens + num_uncached,
            self.coordinator.scheduler_block_size,
            use_eagle=bool(self.coordinator.{groups}),
        )
""",
            versions=(version,),
        )
        for version, groups in (
            ("0.32.0", "eagle_group_ids"),
            ("0.33.0", "drop_eagle_group_ids"),
        )
    ),
    Edit(
        _MANAGER,
        at="num_new_computed_tokens, shared_prefix_boundary\n",
        put="num_new_computed_tokens, boundaries\n",
    ),
    Edit(
        _MANAGER,
        at="int, bool]:",
        put="tuple[int, ...], bool]:",
    ),
    Edit(
        _MANAGER,
        at="shared-prefix boundary) plus",
        put="shared-prefix boundaries) plus",
    ),
    Edit(_MANAGER, at="0, 0, False", put="0, (), False"),
    Edit(_MANAGER, at="(boundary 0)", put="(no boundaries)"),
    Edit(_MANAGER, at="num_local, 0, min", put="num_local, (), min"),
)

_GROUP_MANAGER_EDITS = (
    *(
        Edit(
            _GROUP_MANAGERS,
            at="reachable_boundaries = [*replay_boundaries]",
            until=until,
            put="""\
reachable_boundaries = (
            *replay_boundaries,
            *request.shared_prefix_boundaries,
        )""",
            versions=(version,),
        )
        for version, until in (
            ("0.32.0", "reachable_boundaries.append(request.shared_prefix_boundary)"),
            ("0.33.0", "self.block_size\n                )"),
        )
    ),
    Edit(
        _GROUP_MANAGERS,
        at="position != request.shared_prefix_boundary",
        put="position not in request.shared_prefix_boundaries",
    ),
    Edit(
        _GROUP_MANAGERS,
        at="num_tokens == request.shared_prefix_boundary",
        put="num_tokens in request.shared_prefix_boundaries",
    ),
)

_SCHEDULER_EDITS = (
    Edit(
        _SCHEDULER,
        at="class Scheduler(SchedulerInterface):",
        how="before",
        put='''\
# Waiting requests that are looked at; about as many as may enter in one pass.
MAX_WAITING_SIBLINGS = 256


def sibling_waits(
    request: Request, waiting: Iterable[Request], hash_block_size: int
) -> bool:
    """Whether a request that waits shares the prefix up to the first boundary.

    In the same pass it hits what this request's first chunk reaches, and less if
    that chunk stopped early: the last of the siblings stops instead.
    """
    num_hashes = request.shared_prefix_boundaries[0] // hash_block_size
    last = slice(num_hashes - 1, num_hashes)
    shared = request.block_hashes[last]
    return bool(shared) and any(
        other is not request and other.block_hashes[last] == shared
        for other in itertools.islice(waiting, MAX_WAITING_SIBLINGS)
    )


''',
    ),
    Edit(
        _SCHEDULER,
        at="junction = request.shared_prefix_boundary\n",
        until="else block_floored\n        )",
        put="""\
# A junction within this chunk ends it: exactly where the manager keeps
        # sub-block states (inside the prompt), else at the last block boundary.
        junctions = request.prefill_stops
        if request.external_prefix_boundaries and sibling_waits(
            request, self.waiting, self.hash_block_size
        ):
            junctions = request.local_prefix_boundaries[-1:]
        exact_up_to = (
            request.num_prompt_tokens if self.mamba_shared_prefix_checkpoint else 0
        )
        junction_stops = (
            junction
            if junction <= exact_up_to
            else start + (junction - start) // block_size * block_size
            for junction in junctions
            if start < junction < end
        )""",
    ),
    Edit(
        _SCHEDULER,
        at="junction_stop if start < junction < end else 0,",
        put="*junction_stops,",
    ),
    Edit(
        _SCHEDULER,
        at="int, bool]:",
        within="def _get_local_prefix_cache_hit(",
        put="tuple[int, ...], bool]:",
    ),
    Edit(
        _SCHEDULER,
        at="num_local, shared_prefix_boundary = (",
        put="num_local, shared_prefix_boundaries = (",
    ),
    Edit(
        _SCHEDULER,
        at="num_local, shared_prefix_boundary, False",
        put="num_local, shared_prefix_boundaries, False",
    ),
    Edit(
        _SCHEDULER,
        at="request.shared_prefix_boundary,\n",
        how="everywhere",
        put="request.local_prefix_boundaries,\n",
    ),
)

_PREFIX_CACHING = "tests/v1/core/test_prefix_caching.py"
_PARTIAL_HITS = "tests/v1/core/prefix_cache/test_partial_prefix_cache_hits.py"
_CHECKPOINT = "tests/v1/core/prefix_cache/test_mamba_eagle_resume_checkpoint.py"


def _tests(path: str, *pairs: tuple[str, str], versions: tuple[str, ...] = ()):
    return tuple(
        Edit(path, at, put, "everywhere", versions=versions) for at, put in pairs
    )


# The scalar's name in vLLM's own tests.
_TEST_EDITS = (
    *(
        Edit(
            _PREFIX_CACHING,
            at="num_computed, shared",
            within=made,
            until=f"{request}\n    )",
            put=f"num_computed, boundaries = manager.get_computed_blocks({request})",
        )
        for request, made in (
            ("req_0", '"0", prefix, block_size, hash_fn)\n    computed_blocks, '),
            ("req_1", '"1", prefix + [100] * 7, block_size'),
            ("req_2", '"2", prefix[:-1] +'),
        )
    ),
    *_tests(
        _PREFIX_CACHING,
        ("assert shared_prefix_boundary == 0", "assert boundaries == ()"),
        (
            "assert shared_prefix_boundary == 2 * block_size",
            "assert boundaries == (2 * block_size,)",
        ),
        (
            "req_2.shared_prefix_boundary = shared_prefix_boundary",
            "req_2.local_prefix_boundaries = boundaries",
        ),
        ("cb, nc, boundary = man", "cb, nc, boundaries = man"),
        ("assert boundary == 2 *", "assert boundaries[-1] == 2 *"),
        ("assert boundary == 4 *", "assert boundaries[-1] == 4 *"),
        (
            "req1.shared_prefix_boundary = boundary",
            "req1.local_prefix_boundaries = boundaries",
        ),
        ("slots(req1, boundary -", "slots(req1, boundaries[-1] -"),
        ("pin and boundary", "pin and boundaries"),
    ),
    *_tests(
        _PREFIX_CACHING,
        (
            "req.shared_prefix_boundary = shared_prefix_boundary",
            "req.local_prefix_boundaries = (shared_prefix_boundary,)",
        ),
        versions=("0.32.0",),
    ),
    *_tests(
        _PARTIAL_HITS,
        (
            "request.shared_prefix_boundary = 96",
            "request.local_prefix_boundaries = (96,)",
        ),
    ),
    *_tests(
        _CHECKPOINT,
        (
            "request.shared_prefix_boundary = junction",
            "request.local_prefix_boundaries = junction",
        ),
        (
            "manager.get_computed_blocks(consumer)[2]\n",
            "max(manager.get_computed_blocks(consumer)[2], default=0)\n",
        ),
        *(
            (
                f"request.shared_prefix_boundary = {position}\n",
                f"request.local_prefix_boundaries = ({position},)\n",
            )
            for position in (2208, 992, "running", 2000)
        ),
    ),
)

COMMIT = Commit(
    name="core",
    message="""\
[Core] Keep several shared-prefix boundaries per request

A request knows one position at which its prompt parts from earlier ones. Under
EAGLE/MTP two are needed: a sibling that parts within the block above the
position cannot prove it and resumes one scheduler block lower. A KV connector
may know further ones. Keep them as tuples, local and external apart, so that
the local part can be derived again on every attempt to schedule without losing
what the connector reported.

junction_boundaries() is the one rule; sparse groups keep what a later sibling
needs at every boundary. Mamba keeps a state only where a prefill chunk ends, and
each end costs a step: chunks end at two of them at most, first where they do today,
and where a sibling waits, which resumes at the end of the first chunk, those of the
connector are left to it.
""",
    edits=(
        *_REQUEST_EDITS,
        *_COORDINATOR_EDITS,
        *_MANAGER_EDITS,
        *_GROUP_MANAGER_EDITS,
        *_SCHEDULER_EDITS,
        *_TEST_EDITS,
    ),
    new_files=("tests/v1/core/prefix_cache/test_shared_prefix_boundaries.py",),
)

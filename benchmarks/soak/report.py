# SPDX-License-Identifier: Apache-2.0
"""What a soak counted, and what of that is wrong."""

import msgspec

SCHEMA_VERSION = 1
# Resident memory that one process of an instance may gain after its warm-up.
MAX_GROWTH_BYTES = 32 << 20


class ProcessMemory(msgspec.Struct):
    """Resident memory of one process, from its warm-up to its end, in bytes."""

    process: str
    seconds: float
    baseline_bytes: int
    last_bytes: int

    @property
    def growth_bytes(self) -> int:
        return self.last_bytes - self.baseline_bytes


class SoakReport(msgspec.Struct):
    """The counts of a run, as ``results/soak.json`` holds them.

    Attributes:
        seed: What all traffic, resets and faults were drawn from.
        minutes: How long traffic ran.
        junctions: Whether the instances ran with junctions, or stock.
        requests: All that were sent: the sum of the next four.
        replies: Ended with every token that they asked for.
        aborts: Whose connection the client closed before the reply.
        interrupted: Sent to an instance that a fault killed meanwhile.
        lost_requests: Ended any other way.
        resets: Local prefix caches reset, at rest and under traffic.
        refused_resets: Those that the server refused.
        faults: Injected faults by kind.
        checked: Replies compared with a cold server's answer.
        checked_with_hits: Those that had loaded or found part of their prompt.
        wrong_outputs: Those that differ by more than the tolerance.
        largest_logprob_error: The largest difference of all that do not.
        prompt_tokens: Looked up by the instances, of which ...
        local_hit_tokens: ... were found in the local cache, and ...
        hit_tokens: ... were loaded from the store.
        preemptions: Requests that had to give up their blocks.
        evicted_keys: What the store evicted.
        failed_keys: Keys of loads and saves that failed, by operation.
        leak_checks: Times that an instance at rest was looked into.
        leaked_references: Blocks, saves or table entries that it still held.
        memory: Processes that lived long enough to tell.
        problems: What is wrong, in words; empty after a good run.
    """

    seed: int
    minutes: float
    junctions: bool
    model: str
    vllm_version: str
    schema_version: int = SCHEMA_VERSION
    requests: int = 0
    replies: int = 0
    aborts: int = 0
    interrupted: int = 0
    lost_requests: int = 0
    resets: int = 0
    refused_resets: int = 0
    faults: dict[str, int] = msgspec.field(default_factory=dict)
    checked: int = 0
    checked_with_hits: int = 0
    wrong_outputs: int = 0
    largest_logprob_error: float = 0.0
    prompt_tokens: int = 0
    local_hit_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    evicted_keys: int = 0
    failed_keys: dict[str, int] = msgspec.field(default_factory=dict)
    leak_checks: int = 0
    leaked_references: int = 0
    memory: list[ProcessMemory] = msgspec.field(default_factory=list)
    problems: list[str] = msgspec.field(default_factory=list)

    def conclude(self) -> None:
        """Turn counts into problems; a run that tried nothing is one, too."""
        for name in ("wrong_outputs", "leaked_references", "lost_requests"):
            if count := getattr(self, name):
                self.problems.append(f"{name} is {count}, not 0")
        for name in ("hit_tokens", "checked_with_hits", "leak_checks", "aborts"):
            if not getattr(self, name):
                self.problems.append(f"{name} is 0: the run has not tried it")
        ended = self.replies + self.aborts + self.interrupted + self.lost_requests
        if ended != self.requests:
            self.problems.append(f"{self.requests} requests sent, {ended} ended")
        for process in self.memory:
            if process.growth_bytes > MAX_GROWTH_BYTES:
                self.problems.append(
                    f"{process.process} grew by {process.growth_bytes >> 20} MiB in "
                    f"{process.seconds:.0f} s, more than {MAX_GROWTH_BYTES >> 20} MiB"
                )

# SPDX-License-Identifier: Apache-2.0
"""Traffic, resets, faults and checks, side by side until the time is up."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from rich.console import Console

from benchmarks.soak.fleet import Fleet, Instance, Leak
from benchmarks.soak.outputs import (
    LOGPROB_TOLERANCE,
    cold_body,
    cold_candidates,
    completion_body,
    logprob_error,
)
from benchmarks.soak.report import SoakReport
from benchmarks.soak.workload import Forest, Job, jobs
from testbed.processes import ProcessFailed

_REQUEST_SECONDS = 180.0
_MEASURE_SECONDS = 5.0
_PROGRESS_SECONDS = 30.0
_FREEZE_SECONDS = 3.0
# Answers that wait for the cold server; clients wait when there are more.
_MAX_UNCHECKED = 8
# Lost requests after which a run tells nothing more.
_MAX_LOST = 20


class GivenUp(RuntimeError):
    """So much is wrong that the run ends before its time."""


def _leaves(group: BaseExceptionGroup) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        nested = isinstance(error, BaseExceptionGroup)
        leaves += _leaves(error) if nested else [error]
    return leaves


class Answer(msgspec.Struct):
    """A reply that the cold server is asked about."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    instance: str
    seconds: float


class WrongOutput(msgspec.Struct):
    """An answer that a cold server would not have given, for who looks into it."""

    error: float
    answer: Answer
    cold: list[dict[str, Any]]


class Soak:
    """One run.

    Args:
        fleet: Servers, entered but not started.
        report: Where everything is counted; its seed is the run's.
        num_clients: Clients, each with one request at a time.
        work_dir: Where wrong outputs go, one JSON object a line.
        console: For progress.
    """

    def __init__(
        self,
        fleet: Fleet,
        report: SoakReport,
        num_clients: int,
        work_dir: Path,
        console: Console,
    ) -> None:
        self._fleet = fleet
        self._report = report
        self._num_clients = num_clients
        self._wrong_path = work_dir / "wrong-outputs.jsonl"
        self._console = console
        self._forest = Forest(report.seed)
        self._unchecked: asyncio.Queue[Answer] = asyncio.Queue(_MAX_UNCHECKED)
        self._busy = {instance.name: asyncio.Lock() for instance in fleet.instances}
        self._start = self._end = 0.0
        self._faults: dict[str, Callable[[], Awaitable[None]]] = {
            "killed_instance": self._kill_instance,
            "restarted_master": self._restart_master,
            "wiped_store": self._wipe_store,
            "frozen_master": self._freeze_master,
        }

    async def run(self) -> None:
        """Run until the time is up and everything has been checked."""
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            timeout=_REQUEST_SECONDS, limits=limits
        ) as self._http:
            await self._fleet.start(self._http)
            self._start = time.monotonic()
            self._end = self._start + self._report.minutes * 60
            self._say("traffic starts")
            try:
                await self._run_and_check()
            except* (GivenUp, ProcessFailed, httpx.HTTPError) as group:
                self._report.problems += [
                    f"the run ended early: {error!r}" for error in _leaves(group)
                ]
        self._collect()

    async def _run_and_check(self) -> None:
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(task)
                for task in (self._check_answers(), self._measure(), self._tell())
            ]
            await self._run_traffic()
            await self._unchecked.join()
            self._say("traffic has ended; looking for what is left")
            for instance in self._fleet.instances:
                await self._check_leaks(instance)
            await self._fleet.measure(self._http)
            for task in background:
                task.cancel()

    async def _run_traffic(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(self._num_clients):
                group.create_task(self._client(index))
            group.create_task(self._reset_caches())
            group.create_task(self._inject_faults())

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _say(self, text: str) -> None:
        self._console.print(f"soak {self._seconds:6.0f} s: {text}")

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self._report.seed}/{name}")

    # --- traffic ---------------------------------------------------------------

    async def _client(self, index: int) -> None:
        seed = f"{self._report.seed}/client/{index}"
        source = jobs(self._forest, seed, len(self._fleet.instances))
        while time.monotonic() < self._end:
            await self._send(next(source))

    def _choose(self, job: Job) -> Instance:
        chosen = self._fleet.instances[job.instance]
        if chosen.is_open:
            return chosen
        return next((i for i in self._fleet.instances if i.is_open), chosen)

    async def _send(self, job: Job) -> None:
        instance = self._choose(job)
        await instance.enter()
        generation = instance.generation
        self._report.requests += 1
        try:
            async with asyncio.timeout(job.abort_after_seconds):
                reply = await self._http.post(
                    f"{instance.url}/v1/completions",
                    json=completion_body(instance.model, job.prompt, job.max_tokens),
                )
        except TimeoutError:
            self._report.aborts += 1
            return
        except httpx.HTTPError as error:
            if instance.dead or instance.generation != generation:
                self._report.interrupted += 1
            else:
                self._lose(instance, job, repr(error))
            return
        finally:
            instance.leave()
        await self._take(instance, job, reply)

    async def _take(self, instance: Instance, job: Job, reply: httpx.Response) -> None:
        if not reply.is_success:
            self._lose(instance, job, f"{reply.status_code}: {reply.text[:300]}")
            return
        choice, usage = reply.json()["choices"][0], reply.json()["usage"]
        if len(choice["token_ids"]) != job.max_tokens:
            got = f"{len(choice['token_ids'])} of {job.max_tokens} tokens"
            self._lose(instance, job, f"{got}, {choice['finish_reason']}")
            return
        self._report.replies += 1
        if job.check:
            details = usage["prompt_tokens_details"] or {}
            answer = Answer(
                job.prompt,
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                details.get("cached_tokens") or 0,
                f"{instance.name}-{instance.generation}",
                self._seconds,
            )
            await self._unchecked.put(answer)

    def _lose(self, instance: Instance, job: Job, why: str) -> None:
        self._report.lost_requests += 1
        self._report.problems.append(
            f"lost at {self._seconds:.0f} s on {instance.name}-{instance.generation}, "
            f"{len(job.prompt)} prompt tokens: {why}"
        )
        self._say(self._report.problems[-1])
        if self._report.lost_requests >= _MAX_LOST:
            raise GivenUp(f"{_MAX_LOST} requests are lost")

    # --- checks ----------------------------------------------------------------

    async def _check_answers(self) -> None:
        while True:
            answer = await self._unchecked.get()
            try:
                await self._check(answer)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self._report.problems.append(f"no cold answer: {error!r}")
            finally:
                self._unchecked.task_done()

    async def _check(self, answer: Answer) -> None:
        cold = self._fleet.cold
        body = cold_body(cold.model, answer.prompt, answer.token_ids)
        reply = await self._http.post(f"{cold.url}/v1/completions", json=body)
        reply.raise_for_status()
        candidates = cold_candidates(reply, len(answer.token_ids))
        error = logprob_error(answer.token_ids, answer.logprobs, candidates)
        report = self._report
        report.checked += 1
        report.checked_with_hits += answer.cached_tokens > 0
        if error <= LOGPROB_TOLERANCE:
            report.largest_logprob_error = max(report.largest_logprob_error, error)
            return
        report.wrong_outputs += 1
        self._say(
            f"WRONG by {error:.3g}: {answer.instance}, {len(answer.prompt)} prompt "
            f"tokens, {answer.cached_tokens} cached, answered at {answer.seconds:.0f} s"
        )
        with self._wrong_path.open("ab") as wrong:
            wrong.write(
                msgspec.json.encode(WrongOutput(error, answer, candidates)) + b"\n"
            )

    async def _check_leaks(self, instance: Instance) -> None:
        """Shut traffic out, and see that the instance lets go of everything."""
        instance.close()
        try:
            await instance.check_at_rest(self._http)
            self._report.resets += 1
        except Leak as leak:
            self._report.leaked_references += leak.num_references
            self._report.problems.append(f"at {self._seconds:.0f} s: {leak}")
            self._say(self._report.problems[-1])
        finally:
            self._report.leak_checks += 1
            instance.open()

    async def _measure(self) -> None:
        while True:
            await self._fleet.measure(self._http)
            await asyncio.sleep(_MEASURE_SECONDS)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            self._collect()
            report = self._report
            self._say(
                f"{report.requests} requests, {report.aborts} aborts, "
                f"{report.resets} resets, {sum(report.faults.values())} faults, "
                f"{report.hit_tokens} hit tokens, {report.preemptions} preemptions, "
                f"{report.evicted_keys} evicted, {report.checked} checked "
                f"({report.checked_with_hits} with hits), "
                f"{report.wrong_outputs} wrong"
            )

    def _collect(self) -> None:
        totals: Counter[str] = Counter()
        for instance in self._fleet.instances:
            totals += instance.counters
        report = self._report
        for name in ("prompt_tokens", "local_hit_tokens", "hit_tokens", "preemptions"):
            setattr(report, name, totals[name])
        report.failed_keys = {
            name.split(":")[1]: count
            for name, count in totals.items()
            if name.startswith("failed_keys:")
        }
        report.evicted_keys = self._fleet.evicted_keys
        report.memory = [m for i in self._fleet.instances for m in i.memory]

    # --- resets ----------------------------------------------------------------

    async def _reset_caches(self) -> None:
        rng = self._rng("resets")
        while await self._wait(rng.uniform(5.0, 12.0)):
            instance, at_rest = rng.choice(self._fleet.instances), rng.random() < 0.5
            if self._busy[instance.name].locked():
                continue
            async with self._busy[instance.name]:
                if at_rest:
                    await self._check_leaks(instance)
                else:
                    await self._reset_under_traffic(instance)

    async def _reset_under_traffic(self, instance: Instance) -> None:
        """Ask for a reset that is refused while a request or a save holds blocks."""
        reply = await self._http.post(f"{instance.url}/reset_prefix_cache")
        if reply.raise_for_status().json()["success"]:
            self._report.resets += 1
        else:
            self._report.refused_resets += 1

    async def _wait(self, seconds: float) -> bool:
        """Sleep; return whether traffic still goes on."""
        await asyncio.sleep(max(min(seconds, self._end - time.monotonic()), 0))
        return time.monotonic() < self._end

    # --- faults ----------------------------------------------------------------

    async def _inject_faults(self) -> None:
        rng = self._rng("faults")
        # All kinds even in a short run, a few minutes apart in a long one.
        period = min(self._report.minutes * 60 / (len(self._faults) + 1), 120.0)
        kinds: list[str] = []
        while await self._wait(rng.uniform(0.7, 1.0) * period):
            if not kinds:
                kinds = sorted(self._faults)
                rng.shuffle(kinds)
            kind = kinds.pop()
            self._say(f"fault: {kind}")
            await self._faults[kind]()
            faults = self._report.faults
            faults[kind] = faults.get(kind, 0) + 1

    async def _kill_instance(self) -> None:
        """Kill the second instance amid its traffic, and start it again.

        The first one lives on: it sees keys whose values are gone, and shows whether
        memory grows.
        """
        instance = self._fleet.instances[1]
        async with self._busy[instance.name]:
            instance.kill()
            await asyncio.sleep(2)
            instance.start()
            await instance.wait_ready(self._http)

    async def _restart_master(self) -> None:
        self._fleet.restart_master()

    async def _wipe_store(self) -> None:
        """Reset the store through one instance at rest, while the other goes on."""
        instance = self._fleet.instances[1]
        async with self._busy[instance.name]:
            await self._check_leaks(instance)
            instance.close()
            try:
                reply = await self._http.post(
                    f"{instance.url}/reset_prefix_cache",
                    params={"reset_external": "true"},
                )
                reply.raise_for_status()
            finally:
                instance.open()

    async def _freeze_master(self) -> None:
        """Stop the master's clock for a while: every call to it hangs."""
        pids = [
            child.pid
            for child in psutil.Process(self._fleet.master.pid).children(recursive=True)
        ]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(_FREEZE_SECONDS)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

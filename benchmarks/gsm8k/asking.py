# SPDX-License-Identifier: Apache-2.0
"""Asks one server the questions, and notes what each cost and hit."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from benchmarks.gsm8k.data import STOP, Example, extract_answer
from benchmarks.gsm8k.journal import Answer, Journal, Totals
from benchmarks.junction_probe import ProbeError, metric_totals

LOCAL_QUERIES = "vllm:prefix_cache_queries"
LOCAL_HITS = "vllm:prefix_cache_hits"
STORE_QUERIES = "vllm:external_prefix_cache_queries"
STORE_HITS = "vllm:external_prefix_cache_hits"
_COUNTERS = (LOCAL_QUERIES, LOCAL_HITS, STORE_QUERIES, STORE_HITS)
# Questions whose prompts are sent once more when a run goes on: as many as it takes
# until siblings hit (the first is stored, the second finds the junction).
_WARM_UP = 2


@dataclass(frozen=True)
class Completion:
    """What the server streamed for one prompt."""

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float
    total_seconds: float


class CompletionServer:
    """Completions, counters and cache of one OpenAI-compatible vLLM server."""

    def __init__(self, base_url: str, timeout_seconds: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._http = httpx.Client(base_url=self.base_url, timeout=timeout_seconds)

    def close(self) -> None:
        self._http.close()

    def select_model(self, wanted: str | None) -> str:
        """Return the model to ask; by default the only one that is served.

        Raises:
            ProbeError: No server, none of its kind, or not the wanted model.
        """
        try:
            answer = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ProbeError(
                f"No server answers at {self.base_url} ({error})"
            ) from error
        try:
            served = [model["id"] for model in answer.raise_for_status().json()["data"]]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise ProbeError(
                f"What answers at {self.base_url} is no OpenAI-compatible server: "
                "/v1/models gives no list of models"
            ) from error
        if not served or (wanted is not None and wanted not in served):
            raise ProbeError(
                f"The server at {self.base_url} serves {', '.join(served) or 'nothing'}"
                f", not {wanted}"
            )
        return wanted or served[0]

    def version(self) -> str:
        """Return vLLM's version; empty: the server does not tell."""
        answer = self._http.get("/version")
        return answer.json().get("version", "") if answer.is_success else ""

    def config(self) -> dict[str, Any]:
        """Return the server's configuration; empty without dev mode."""
        answer = self._http.get("/server_info", params={"config_format": "json"})
        return answer.json().get("vllm_config", {}) if answer.is_success else {}

    def count_tokens(self, model: str, text: str) -> int:
        """Return a prompt's length in tokens.

        Raises:
            ProbeError: The server cannot tell.
        """
        answer = self._http.post("/tokenize", json={"model": model, "prompt": text})
        if not answer.is_success:
            raise ProbeError(
                f"The server at {self.base_url} does not tokenize "
                f"(status {answer.status_code}); it has to be vLLM with a tokenizer"
            )
        return answer.json()["count"]

    def counters(self) -> dict[str, float]:
        """Return the hit counters, summed over engines.

        Raises:
            ProbeError: There is no metrics endpoint, or it lacks vLLM's counters.
        """
        answer = self._http.get("/metrics")
        totals = metric_totals(answer.text, _COUNTERS) if answer.is_success else {}
        if LOCAL_QUERIES not in totals:
            raise ProbeError(
                f"{self.base_url}/metrics has no {LOCAL_QUERIES}, so hits cannot be "
                "counted: start the server without --disable-log-stats"
            )
        return {name: totals.get(name, 0.0) for name in _COUNTERS}

    def reset_local_cache(self) -> None:
        """Reset the local prefix cache once all saves have landed.

        Raises:
            ProbeError: The server has no dev mode, or refuses for too long.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            answer = self._http.post("/reset_prefix_cache")
            if not answer.is_success:
                raise ProbeError(
                    f"The server at {self.base_url} cannot reset its prefix cache "
                    f"(status {answer.status_code}); start it with "
                    "VLLM_SERVER_DEV_MODE=1 or leave --reset-local-cache out"
                )
            if answer.json().get("success", True):
                return
            if time.monotonic() > deadline:
                raise ProbeError(
                    "The server still refuses to reset its prefix cache after "
                    f"{self._timeout_seconds:.0f} s: saves to the store hang, or "
                    "other requests are running; look at its log"
                )
            time.sleep(0.05)

    def complete(self, model: str, prompt: str, max_tokens: int) -> Completion:
        """Send a prompt, greedy; return what came and when.

        Raises:
            ProbeError: The server refused it or broke off.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stop": STOP,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                raise ProbeError(
                    f"The server refused a prompt: {answer.read().decode()[:500]}"
                )
            first, text, reason, usage = None, [], None, None
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = msgspec.json.decode(line.removeprefix("data: "))
                if "error" in event:
                    raise ProbeError(f"The server broke off: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    first = first or time.perf_counter() - start
                    text.append(choice["text"])
                    reason = choice.get("finish_reason") or reason
        if first is None or usage is None or reason is None:
            raise ProbeError("The server broke off in the middle of an answer")
        return Completion(
            text="".join(text),
            finish_reason=reason,
            prompt_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            ttft_seconds=first,
            total_seconds=time.perf_counter() - start,
        )

    def gained_since(
        self, before: dict[str, float], prompt_tokens: int
    ) -> dict[str, int]:
        """Return by how much each counter has grown.

        Args:
            before: The counters before the questions asked since.
            prompt_tokens: Their prompts' sum, which the counters must account for.

        Raises:
            ProbeError: They do not, so the hits cannot be told apart from others'.
        """
        deadline = time.monotonic() + 30
        while True:
            now = self.counters()
            gained = {name: int(now[name] - before[name]) for name in now}
            if gained[LOCAL_QUERIES] == prompt_tokens:
                return gained
            if gained[LOCAL_QUERIES] > prompt_tokens or time.monotonic() > deadline:
                raise ProbeError(
                    f"The server counted {gained[LOCAL_QUERIES]} looked-up tokens "
                    f"for {prompt_tokens} sent: prefix caching is off, or others use "
                    "the server, and hits cannot be told apart"
                )
            time.sleep(0.05)


@dataclass(frozen=True)
class Asking:
    """How the questions are asked."""

    server: CompletionServer
    model: str
    prompts: list[str]
    examples: list[Example]
    max_tokens: int
    concurrency: int
    reset_local_cache: bool

    def run(self, journal: Journal, tick: Callable[[], object]) -> None:
        """Ask what the journal lacks; note each answer as it comes.

        Args:
            tick: Called after each answer.

        Raises:
            ProbeError: The server cannot go on. The journal keeps what there is.
        """
        todo = journal.missing(range(len(self.prompts)))
        restarted = bool(journal.answers)
        if restarted and todo:
            self._warm_up(todo[0])
        if self.concurrency == 1:
            for position, index in enumerate(todo):
                journal.add(self._ask_alone(index, restarted and position == 0))
                tick()
        elif todo:
            self._ask_together(todo, journal, tick, restarted)

    def _warm_up(self, next_index: int) -> None:
        for index in range(max(0, next_index - _WARM_UP), next_index):
            if self.reset_local_cache:
                self.server.reset_local_cache()
            self.server.complete(self.model, self.prompts[index], max_tokens=1)

    def _ask_alone(self, index: int, after_restart: bool) -> Answer:
        if self.reset_local_cache:
            self.server.reset_local_cache()
        before = self.server.counters()
        done = self.server.complete(self.model, self.prompts[index], self.max_tokens)
        gained = self.server.gained_since(before, done.prompt_tokens)
        return self._answer(index, done, gained, after_restart)

    def _ask_together(
        self,
        todo: list[int],
        journal: Journal,
        tick: Callable[[], object],
        restarted: bool,
    ) -> None:
        before = self.server.counters()
        unnoted: dict[Future[Completion], int] = {}
        sent = 0

        def note(future: Future[Completion]) -> int:
            done, index = future.result(), unnoted.pop(future)
            after_restart = restarted and index == todo[0]
            journal.add(self._answer(index, done, None, after_restart))
            tick()
            return done.prompt_tokens

        with ThreadPoolExecutor(self.concurrency) as pool:
            for index in todo:
                prompt = self.prompts[index]
                unnoted[
                    pool.submit(
                        self.server.complete, self.model, prompt, self.max_tokens
                    )
                ] = index
            try:
                for future in as_completed(list(unnoted)):
                    sent += note(future)
            except BaseException:
                # Those under way still count in the server's totals.
                pool.shutdown(cancel_futures=True)
                sent += sum(
                    note(future) for future in list(unnoted) if _is_good(future)
                )
                with contextlib.suppress(ProbeError, httpx.HTTPError):
                    self._note_totals(before, sent, journal)
                raise
        self._note_totals(before, sent, journal)

    def _note_totals(
        self, before: dict[str, float], sent_tokens: int, journal: Journal
    ) -> None:
        gained = self.server.gained_since(before, sent_tokens)
        journal.add_totals(
            Totals(gained[LOCAL_HITS], gained[STORE_HITS], _looked_up(gained))
        )

    def _answer(
        self,
        index: int,
        done: Completion,
        gained: dict[str, int] | None,
        after_restart: bool,
    ) -> Answer:
        number = extract_answer(done.text)
        return Answer(
            index=index,
            prompt_tokens=done.prompt_tokens,
            output_tokens=done.output_tokens,
            local_hit_tokens=gained[LOCAL_HITS] if gained else None,
            store_hit_tokens=gained[STORE_HITS] if gained else None,
            query_tokens=_looked_up(gained) if gained else None,
            ttft_seconds=done.ttft_seconds,
            total_seconds=done.total_seconds,
            finish_reason=done.finish_reason,
            text=done.text,
            number=number,
            correct=number == extract_answer(self.examples[index].answer),
            after_restart=after_restart,
        )


def _is_good(future: Future[Completion]) -> bool:
    return not future.cancelled() and future.done() and future.exception() is None


def _looked_up(gained: dict[str, int]) -> int:
    return gained[STORE_QUERIES] or gained[LOCAL_QUERIES]

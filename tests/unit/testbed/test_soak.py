# SPDX-License-Identifier: Apache-2.0
import asyncio
import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from benchmarks.soak import fleet
from benchmarks.soak.fleet import Instance, Leak, read_counters
from benchmarks.soak.outputs import LOGPROB_TOLERANCE, logprob_error
from benchmarks.soak.report import MAX_GROWTH_BYTES, ProcessMemory, SoakReport
from benchmarks.soak.watch import Holdings, held
from benchmarks.soak.workload import Forest, jobs


def _candidates(*logprobs: tuple[int, float]) -> dict[str, dict[str, float]]:
    return {str(token_id): {"logprob": logprob} for token_id, logprob in logprobs}


class TestLogprobError:
    def test_the_cold_servers_own_answer_has_none(self):
        cold = [_candidates((7, -0.25)), _candidates((9, -1.0))]
        assert logprob_error([7, 9], [-0.25, -1.0], cold) == 0.0

    def test_a_near_tie_that_fell_the_other_way_is_small(self):
        cold = [_candidates((7, -0.700002), (8, -0.700001))]
        assert logprob_error([7], [-0.700002], cold) < LOGPROB_TOLERANCE

    def test_a_token_that_the_cold_server_would_not_choose_shows(self):
        cold = [_candidates((7, -0.9), (8, -0.5))]
        assert logprob_error([7], [-0.9], cold) == pytest.approx(0.4)

    def test_the_right_token_for_wrong_reasons_shows(self):
        cold = [_candidates((7, -0.5)), _candidates((7, -0.5))]
        assert logprob_error([7, 7], [-0.5, -0.6], cold) == pytest.approx(0.1)

    def test_an_answer_of_another_length_is_an_error(self):
        with pytest.raises(ValueError, match="zip"):
            logprob_error([7], [-0.5], [])


class TestWorkload:
    def _take(self, seed: int, count: int = 400):
        return list(itertools.islice(jobs(Forest(seed), f"{seed}/0", 2), count))

    def test_the_seed_decides_everything(self):
        assert self._take(3) == self._take(3)
        assert self._take(3) != self._take(4)

    def test_it_has_siblings_replays_aborts_and_checks(self):
        drawn = self._take(3)
        prompts = [tuple(job.prompt) for job in drawn]
        trunks = {prompt[:64] for prompt in prompts}
        assert len(trunks) < len(set(prompts)) / 4
        assert len(set(prompts)) < len(prompts)
        assert any(job.abort_after_seconds is not None for job in drawn)
        assert any(job.check for job in drawn)
        assert {job.instance for job in drawn} == {0, 1}

    def test_an_aborted_request_is_never_checked(self):
        for job in self._take(3):
            assert not (job.check and job.abort_after_seconds is not None)

    def test_prompts_and_answers_fit_the_model(self):
        limit = fleet.MAX_MODEL_TOKENS
        for seed in range(5):
            for job in self._take(seed):
                assert len(job.prompt) + job.max_tokens < limit

    def test_trees_are_replaced(self):
        drawn = self._take(3)
        first = {tuple(job.prompt[:64]) for job in drawn[:30]}
        last = {tuple(job.prompt[:64]) for job in drawn[-30:]}
        assert not first & last


def _good_report() -> SoakReport:
    return SoakReport(
        seed=1,
        minutes=1,
        junctions=True,
        model="gemma3-tiny",
        vllm_version="0.32.0",
        requests=10,
        replies=7,
        aborts=2,
        interrupted=1,
        checked=3,
        checked_with_hits=2,
        hit_tokens=64,
        leak_checks=1,
    )


class TestReport:
    def test_a_good_run_has_no_problems(self):
        report = _good_report()
        report.conclude()
        assert report.problems == []

    @pytest.mark.parametrize(
        ("name", "value", "problem"),
        [
            ("wrong_outputs", 1, "wrong_outputs is 1, not 0"),
            ("leaked_references", 3, "leaked_references is 3, not 0"),
            ("hit_tokens", 0, "hit_tokens is 0: the run has not tried it"),
            ("checked_with_hits", 0, "checked_with_hits is 0: the run has not"),
            ("leak_checks", 0, "leak_checks is 0: the run has not tried it"),
            ("requests", 11, "11 requests sent, 10 ended"),
        ],
    )
    def test_what_is_wrong_is_said(self, name, value, problem):
        report = _good_report()
        setattr(report, name, value)
        report.conclude()
        (said,) = report.problems
        assert said.startswith(problem)

    def test_growth_beyond_the_bound_is_a_problem(self):
        report = _good_report()
        for growth in (MAX_GROWTH_BYTES, MAX_GROWTH_BYTES + 1):
            report.memory.append(
                ProcessMemory("one-1 VLLM::Worker", 60, 1 << 30, (1 << 30) + growth)
            )
        report.conclude()
        assert report.problems == [
            "one-1 VLLM::Worker grew by 32 MiB in 60 s, more than 32 MiB"
        ]

    def test_it_survives_json(self):
        report = _good_report()
        report.faults["killed_instance"] = 1
        assert msgspec.json.decode(msgspec.json.encode(report), type=SoakReport) == (
            report
        )


def test_counters_are_read_from_the_metrics_of_a_server():
    operation = "vllm:mooncake_store_operation_failed_keys_total"
    text = f"""# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{{engine="0"}} 640
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0"}} 3
# TYPE {operation} counter
{operation}{{operation="load_get",status="partial_failure"}} 4
{operation}{{operation="load_get",status="error"}} 1
"""
    assert read_counters(text) == {
        "hit_tokens": 640,
        "preemptions": 3,
        "failed_keys:load_get": 5,
    }


def _report_holdings(directory: Path, **tables: int) -> None:
    for name in ("MooncakeStoreScheduler", "KVCacheStoreSendingThread"):
        sizes = tables if name == "MooncakeStoreScheduler" else {}
        holdings = Holdings(time.monotonic() + 60, sizes)
        (directory / f"{name}.json").write_bytes(msgspec.json.encode(holdings))


class TestAtRest:
    @pytest.fixture
    def instance(self, tmp_path, monkeypatch):
        (tmp_path / "watch").mkdir()
        monkeypatch.setattr(fleet, "_REST_SECONDS", 0.1)
        monkeypatch.setattr(fleet, "_SETTLE_SECONDS", 0.01)
        instance = Instance("one", lambda name: None)
        instance.server = SimpleNamespace(base_url="http://test", work_dir=tmp_path)
        return instance

    def _check(self, instance: Instance, reset: bool) -> None:
        answer = httpx.MockTransport(
            lambda request: httpx.Response(200, json={"success": reset})
        )

        async def check():
            async with httpx.AsyncClient(transport=answer) as http:
                await instance.check_at_rest(http)

        asyncio.run(check())

    def test_an_engine_that_holds_nothing_passes(self, instance):
        _report_holdings(instance.watch_dir, blocks=0, _pinned_saves=0)
        self._check(instance, reset=True)

    def test_a_pinned_save_is_a_leak(self, instance):
        _report_holdings(instance.watch_dir, blocks=0, _pinned_saves=2)
        with pytest.raises(Leak, match="_pinned_saves': 2") as caught:
            self._check(instance, reset=True)
        assert caught.value.num_references == 2

    def test_a_refused_reset_is_a_leak(self, instance):
        _report_holdings(instance.watch_dir, blocks=0)
        with pytest.raises(Leak, match="reset refused"):
            self._check(instance, reset=False)

    def test_an_engine_that_no_longer_reports_is_one_too(self, instance):
        with pytest.raises(Leak, match="no report"):
            self._check(instance, reset=True)


def test_reports_from_before_do_not_count(tmp_path):
    _report_holdings(tmp_path, blocks=1)
    assert held(tmp_path, time.monotonic()) == {"MooncakeStoreScheduler.blocks": 1}
    assert held(tmp_path, time.monotonic() + 120) is None

# SPDX-License-Identifier: Apache-2.0
"""Whether an engine in a box is as good as new after a fault, and what it counts."""

from collections.abc import Callable

from testbed.box import Box, BoxEngine
from tests.engine.layouts import Tokens
from vllm.junctions.metrics.counted import Metric
from vllm.junctions.repairs.endless_loads import num_failed_loads


def assert_healthy(box: Box, engine: BoxEngine) -> None:
    """Nothing wrong is stored, nothing is left behind, and the engine still works."""
    tokens = Tokens(seed=len(engine.served) + 1000)
    prompt = tokens(5 * box.layout.scheduler_block_tokens + 1)
    served = engine.serve(prompt, "health")
    assert served.finish_reason == "length"
    engine.reset_local_cache()
    again = engine.serve(prompt, "health again")
    assert again.store_hit_tokens == 5 * box.layout.scheduler_block_tokens
    assert box.faults() == []
    assert_nothing_left(engine)


def assert_nothing_left(engine: BoxEngine) -> None:
    engine.step()
    scheduler, worker = engine.scheduler, engine.worker.connector_worker
    side = scheduler.connector.connector_scheduler
    assert not side._pinned_saves
    assert not side.load_specs
    assert not side.client.futures
    assert num_failed_loads(side) == {}
    assert len(side._junction_tracker) == 0
    assert not scheduler.failed_recving_kv_req_ids
    engine.reset_local_cache()
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == engine.options.num_blocks - 1
    threads = [worker.kv_send_thread, *worker.kv_recv_threads]
    assert all(thread.is_alive() for thread in (*threads, worker.lookup_server.thread))
    assert all(not thread.request_queue.unfinished_tasks for thread in threads)


def counters(engine: BoxEngine) -> dict[str, int]:
    """Counts of the scheduler's side."""
    side = engine.scheduler.connector.connector_scheduler
    return side.client.counters.as_dict()


class Counted(dict[tuple[str, ...], float]):
    """What an instance counts from now on, by metric name and labels.

    The engine takes its counters' records at each step, so they are noted on the way.
    """

    def __init__(self, engine: BoxEngine) -> None:
        super().__init__()
        for counters in (
            engine.scheduler.connector.connector_scheduler.counters,
            engine.worker.connector_worker.counters,
        ):
            counters.add = self._noting(counters.add)

    def _noting(self, add: Callable[..., None]) -> Callable[..., None]:
        def noting(metric: Metric, value: float = 1, *labels: str) -> None:
            key = (metric.name, *labels)
            self[key] = self.get(key, 0) + value
            add(metric, value, *labels)

        return noting

    def by_label(self, metric: Metric) -> dict[str, float]:
        """Return the values of a metric with one label."""
        return {key[1]: value for key, value in self.items() if key[0] == metric.name}

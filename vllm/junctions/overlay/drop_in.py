# SPDX-License-Identifier: Apache-2.0
"""What vLLM's connector factory loads in the place of ``MooncakeStoreConnector``.

The class keeps the stock name: vLLM finds a connector's metrics by it, and a serve
command selects it by it.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
    connector as stock,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm.junctions import repairs
from vllm.junctions.config import JunctionsConfig
from vllm.junctions.core import CORE_HOOKS
from vllm.junctions.core.managers import JUNCTIONS
from vllm.junctions.overlay.gain import nothing_to_gain
from vllm.junctions.record.connector import recording
from vllm.junctions.repairs.late_loads import land_loads
from vllm.junctions.repairs.short_puts import shorten_puts
from vllm.junctions.seams import compat
from vllm.junctions.seams.switches import switch_on
from vllm.junctions.store import connector as ours
from vllm.junctions.store.worker import JunctionStoreWorker
from vllm.junctions.version import __version__

logger = init_logger(__name__)


class MooncakeStoreConnector(ours.MooncakeStoreConnector):
    """The connector with junctions; a stock one where they cannot gain anything."""

    def __new__(
        cls,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> Any:
        """Return ours, or an object of the stock class and nothing of ours."""
        config = JunctionsConfig.of(vllm_config)
        reason = nothing_to_gain(kv_cache_config) if config.junctions else "off"
        records = config.junctions_record is not None
        if reason is None:
            return super().__new__(recording(cls) if records else cls)
        if role == KVConnectorRole.SCHEDULER and config.junctions:
            logger.info(
                "vllm-junctions %s: nothing to gain, stock connector, no hooks: %s.",
                __version__,
                reason,
            )
        stock_cls = stock.MooncakeStoreConnector
        made = recording(stock_cls) if records else stock_cls
        return made(vllm_config, role, kv_cache_config)

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        compat.check_version()
        compat.check_seams(compat.STORE_SEAMS)
        config = JunctionsConfig.of(vllm_config)
        self._repairs = config.repairs()
        if role == KVConnectorRole.SCHEDULER:
            if not compat.has_native_core():
                CORE_HOOKS.install()
            if self._repairs:
                repairs.HOOKS.install()
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            switch_on(self.connector_scheduler, self._repairs)
            switch_on(self.connector_scheduler.client, self._repairs)
            _say_on(self._repairs, config.junctions_predict)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Answer as stock does, after a look at our own settings.

        vLLM asks while it builds its configuration, before any model is loaded.

        Raises:
            ConfigurationError: See :meth:`JunctionsConfig.from_extra_config`.
        """
        JunctionsConfig.from_extra_config(extra_config)
        return super().requires_piecewise_for_cudagraph(extra_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register KV caches, and mend what the worker's transfers do."""
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        assert isinstance(worker, JunctionStoreWorker)
        if "late_loads" in self._repairs:
            land_loads(worker, worker.protocol, kv_caches, worker.counters.add_fault)
        if "short_puts" in self._repairs:
            shorten_puts(worker, worker.protocol)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Bind the engine's cache manager, and switch our hooks on for it."""
        switch_on(kv_cache_manager, (JUNCTIONS, *self._repairs))
        super().bind_kv_cache_manager(kv_cache_manager)


def _say_on(repairs_on: tuple[str, ...], max_predicted: int) -> None:
    hooks = CORE_HOOKS.installed
    logger.info(
        "vllm-junctions %s: junctions on (vLLM %s, %s; predicted tails: %s; "
        "repairs: %s)",
        __version__,
        compat.vllm_version(),
        f"{len(hooks)} hooks: " + ", ".join(name.split(":")[1] for name in hooks)
        if hooks
        else "this vLLM keeps several junctions in its core itself, the store half "
        "is ours",
        f"up to {max_predicted} a prompt" if max_predicted else "none",
        ", ".join(repairs_on) or "none",
    )

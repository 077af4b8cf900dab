# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's own suites are run, and which are left out and why."""

VERSIONS = ("0.32.0", "0.33.0")

# Folders and files below tests/v1. A folder stands for all that is in it; a name
# that a version lacks is reported, not an error: suites come and go.
SUITES = (
    # Prefix caching, single-type managers, scheduler, async scheduler, Mamba split,
    # prefix replay, in-flight windows, KV-cache utils, planning, packing, ...
    "core",
    # The Mooncake store.
    "kv_connector/unit/test_mooncake_store_connector.py",
    "kv_connector/unit/test_mooncake_store_coordinator.py",
    "kv_connector/unit/test_mooncake_store_hma_e2e.py",
    "kv_connector/unit/test_mooncake_store_layout.py",
    "kv_connector/unit/test_mooncake_store_scheduler.py",
    "kv_connector/unit/test_mooncake_store_worker.py",
    "kv_connector/unit/test_mooncake_stats.py",
    # Other connectors' way through the same scheduler.
    "kv_connector/unit/test_multi_connector.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_error_propagation.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_kv_connector_lifecycle.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_remote_decode_lifecycle.py",
    "kv_connector/unit/test_remote_prefill_lifecycle.py",
    # The request and the specs that the hooks touch.
    "test_kv_cache_spec_registry.py",
    "test_request.py",
)

# Test file or test id below tests/v1 -> why it is not run. Printed with the report.
EXCLUDED: dict[str, str] = {}

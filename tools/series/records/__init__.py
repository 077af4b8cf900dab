# SPDX-License-Identifier: Apache-2.0
"""The commits of the series, in order."""

from tools.series.records import core, metrics, offloading, repairs, store

SERIES = (
    core.COMMIT,
    store.COMMIT,
    offloading.COMMIT,
    *repairs.COMMITS,
    metrics.COMMIT,
)
# Commits that make the feature; those behind them can be dropped one by one.
NUM_REQUIRED = 3
VERSIONS = ("0.32.0", "0.33.0")

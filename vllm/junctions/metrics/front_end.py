# SPDX-License-Identifier: Apache-2.0
"""What the process counts that renders chats and serves ``/metrics``.

Connectors live elsewhere and report through their statistics. These counts need no way:
the metrics of the same process take them along.
"""

from vllm.junctions.metrics.counted import JunctionCounters

FRONT_END = JunctionCounters()

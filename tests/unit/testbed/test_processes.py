# SPDX-License-Identifier: Apache-2.0
import socket

from benchmarks.testbed.processes import free_port_range


def test_a_port_range_is_one_that_mooncake_accepts():
    """It refuses any port of the kernel's ephemeral range, 32768 to 60999."""
    for _ in range(20):
        first, last = free_port_range(64)
        assert last - first == 63
        assert 1024 <= first <= last < 32768


def test_a_port_range_leaves_out_ports_in_use():
    first, _ = free_port_range(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        for _ in range(50):
            low, high = free_port_range(500)
            assert not low <= first <= high

# SPDX-License-Identifier: Apache-2.0
"""Checks of the Mooncake store that ``MOONCAKE_CONFIG_PATH`` names."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from vllm.junctions.doctor import round_trip
from vllm.junctions.doctor.findings import Finding, fail, ok, warn

_CONNECT_SECONDS = 3.0
_ROUND_TRIP_SECONDS = 60.0
# Memory lent to the store for the length of the check, so that an empty store works.
_SEGMENT_BYTES = 64 << 20
_START_MASTER = "start mooncake_master there, or correct master_server_address"


def check_store(round_trip_seconds: float = _ROUND_TRIP_SECONDS) -> Iterator[Finding]:
    """Check the configuration, the master, and one put, get and remove.

    Args:
        round_trip_seconds: How long the last may take. The client blocks for as
            long as it likes and logs a lot, so it has a process of its own.
    """
    path = os.environ.get("MOONCAKE_CONFIG_PATH")
    try:
        # After the environment: this takes in a good part of vLLM.
        from vllm.distributed.mooncake_store import MooncakeStoreConfig

        config: Any = MooncakeStoreConfig.load_from_config()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        yield fail(
            "Mooncake config",
            f"MOONCAKE_CONFIG_PATH={path!r} cannot be used: {error}",
            "point it at the JSON file that the server uses",
        )
        return
    yield ok("Mooncake config", f"{path}: {config.protocol}, {config.mode}")
    reached = _check_master(config.master_server_address)
    yield reached
    if reached.mend == _START_MASTER:
        return
    yield _check_round_trip(config, round_trip_seconds)


def _check_master(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return warn(
            "master",
            f"{address!r} is no host:port; only the round trip tells",
            "nothing, if that succeeds",
        )
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS
        ):
            pass
    except OSError as error:
        return fail("master", f"{address} is unreachable ({error})", _START_MASTER)
    return ok("master", f"{address} accepts connections")


def _check_round_trip(config: Any, seconds: float) -> Finding:
    subject = "round trip"
    command = [sys.executable, round_trip.__file__, _setup_arguments(config)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return fail(
            subject,
            f"put, get and remove took over {seconds:g} s",
            "check that the nodes reach each other (firewall, VLLM_HOST_IP, protocol)",
        )
    said = [line for line in done.stdout.splitlines() if line.startswith("round trip:")]
    text = said[-1].removeprefix("round trip: ") if said else "the client died"
    if done.returncode == 0 and said:
        return ok(subject, text)
    return fail(
        subject,
        text,
        f"see the master's log; the client said: {_last_line(done.stderr)}",
    )


def _setup_arguments(config: Any) -> str:
    """Return what an instance with ``config`` sets its client up with, but small."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import rdma_utils
    from vllm.distributed.mooncake_store import DEFAULT_TENANT_ID
    from vllm.utils.network_utils import get_ip

    tenant = config.tenant_id
    return msgspec.json.encode(
        [
            rdma_utils.get_requester_local_hostname(get_ip()),
            config.metadata_server,
            _SEGMENT_BYTES,
            _SEGMENT_BYTES,
            config.protocol,
            config.device_name,
            config.master_server_address,
            {} if tenant == DEFAULT_TENANT_ID else {"tenant_id": tenant},
        ]
    ).decode()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1]

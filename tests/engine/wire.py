# SPDX-License-Identifier: Apache-2.0
"""The lookup channel in a test's hand."""

from testbed.box import BoxEngine


class AnsweringWire:
    """Answers one engine's next lookups with ``payload``, through its real client."""

    def __init__(self, engine: BoxEngine) -> None:
        self._client = engine.scheduler.connector.connector_scheduler.client
        self._socket = self._client.socket
        self.payload = b""

    def setsockopt(self, *_args) -> None:
        pass

    def send_multipart(self, *_args, **_kwargs) -> None:
        pass

    def recv(self) -> bytes:
        return self.payload

    def __enter__(self) -> "AnsweringWire":
        self._client.socket = self
        return self

    def __exit__(self, *_exc_info) -> None:
        self._client.socket = self._socket

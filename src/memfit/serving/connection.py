"""A connection of the server: what is no HTTP is answered once, and its terminal has a line of it."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

Protocol: Any = AutoHTTPProtocol


class Connection(Protocol):  # type: ignore[misc]
    def send_400_response(self, msg: str) -> None:
        """A body may break after its question has begun, and uvicorn would let that be answered a second time."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()

"""Tokens on their way to the routers: one frame per router and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.messages.decode import StreamOutput, TokenFrame


class Outbox:
    """Collects what a step produced and sends it as one frame per router. `send` must not block."""

    def __init__(self, send: Callable[[bytes, Any], None]) -> None:
        self._send = send
        self._pending: dict[bytes, list[StreamOutput]] = {}

    def put(self, owner: bytes, output: StreamOutput) -> None:
        """Keep an output for its router until the next `flush`."""
        self._pending.setdefault(owner, []).append(output)

    def flush(self, step_s: float) -> None:
        """Send all outputs, and with them how many seconds the step took."""
        pending, self._pending = self._pending, {}
        for owner, outputs in pending.items():
            self._send(owner, TokenFrame(tuple(outputs), step_s))

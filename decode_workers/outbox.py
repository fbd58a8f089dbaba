"""Tokens on their way to the routers: one frame per router and step, or some where there are many streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.messages.decode import StreamOutput, TokenFrame

_MOST_OUTPUTS = 256
"""In one frame. With ten tokens each, and 20 logprobs of each token, they are within what `protocol.codec` lets through."""


class Outbox:
    """Collects what a step produced and sends it to each router, in one frame unless it is too much. `send` must not block."""

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
            for start in range(0, len(outputs), _MOST_OUTPUTS):
                self._send(owner, TokenFrame(tuple(outputs[start : start + _MOST_OUTPUTS]), step_s))

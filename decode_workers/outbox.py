"""Tokens on their way to the routers: one frame per router and step, or some where there are many tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from protocol.messages.decode import StreamOutput, TokenFrame

_MOST_TOKENS = 2_048
"""In one frame, an output without any counted as one. With 20 logprobs each, which are 22 lists, and six for each output, they
are within what `protocol.codec` lets through. A step makes far fewer of one stream."""


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
            for frame in _frames(outputs):
                self._send(owner, TokenFrame(tuple(frame), step_s))


def _frames(outputs: Sequence[StreamOutput]) -> Iterator[list[StreamOutput]]:
    """Cut outputs into runs that one frame may hold each."""
    frame: list[StreamOutput] = []
    num_tokens = 0
    for output in outputs:
        more = max(1, len(output.token_ids))
        if frame and num_tokens + more > _MOST_TOKENS:
            yield frame
            frame, num_tokens = [], 0
        frame.append(output)
        num_tokens += more
    yield frame

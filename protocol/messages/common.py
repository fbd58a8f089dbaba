"""Messages that any two ends may send each other."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import message
from protocol.errors import TandemError, error_from_code


@message(1)
@dataclass(frozen=True)
class Failed:
    """The answer to any question that can't be fulfilled."""

    call_id: int
    code: str
    message: str
    param: str | None
    retry_after_s: float | None

    @classmethod
    def from_error(cls, call_id: int, error: TandemError) -> Failed:
        return cls(call_id, error.code, error.message, error.param, error.retry_after_s)

    def to_error(self) -> TandemError:
        return error_from_code(self.code, self.message, self.param, self.retry_after_s)


@message(2)
@dataclass(frozen=True)
class Ping:
    """Sent by every client of a worker once a second: it renews the leases of all that this client owns there.

    A worker sends it to its clients, too, where they do not get load reports.
    """

    wants_load: bool = False
    """Whether the client is to be sent load reports, from its first such message on."""

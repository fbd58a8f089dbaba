"""Counts what each caller has under way at this router, and refuses what is over a limit. Nothing waits here.

    enter ──► 1 running ──grow──► one for each of its answers at the workers ──leave──► 0
      │         └── received ──► bytes of its body ──text_done──► 0
      └─► refused

A request counts from before its body is read until its last byte is sent, so also while it waits in line. Whoever lets a
request in leaves its visit in a `finally`, so that it is given back however the request ends.
"""

from __future__ import annotations

from collections import Counter

from protocol.errors import InvalidRequestError, RateLimitError
from router.access.callers import Caller


class InFlight:
    """What all callers have under way at one router."""

    def __init__(self, max_body_bytes: int) -> None:
        """`max_body_bytes` is how many bytes of bodies one tenant may have read and not yet worked on."""
        self._max_body_bytes = max_body_bytes
        self._running: Counter[str] = Counter()
        """Running answers by the name of the limits that they count against; no entry is 0."""
        self._body_bytes: Counter[str] = Counter()
        """By tenant; no entry is 0."""

    def enter(self, caller: Caller) -> Visit:
        """Let a request in. Raises RateLimitError if the caller has as many running requests as it may have."""
        visit = Visit(self, caller)
        visit.grow(1)
        return visit

    def running(self, name: str) -> int:
        """Return how many running answers count against the limits of this name."""
        return self._running[name]

    def body_bytes(self, tenant: str) -> int:
        """Return how many bytes of bodies a tenant has read and not yet worked on."""
        return self._body_bytes[tenant]

    def check_running(self, caller: Caller, number: int, more: int, param: str) -> None:
        """Check `more` running answers of a request that would then have `number`. Raises as `Visit.grow`."""
        for limits in caller.limits:
            most = limits.max_running_requests
            if most is not None and number > most:
                raise InvalidRequestError(
                    f"this request has {number} answers at a time, but {limits.whose} may have {most} running", param=param
                )
            if most is not None and self._running[limits.name] + more > most:
                raise RateLimitError(f"{limits.whose} may have {most} requests running; wait until one of them has ended")

    def check_body_bytes(self, tenant: str, more: int) -> None:
        """Check bytes of one more body. Raises RateLimitError if the tenant then has too many."""
        if self._body_bytes[tenant] + more > self._max_body_bytes:
            raise RateLimitError(
                f"bodies of {self._max_body_bytes} bytes are being read and worked on already (http.max_body_bytes_in_flight)"
            )

    def count(self, caller: Caller, *, running: int = 0, body_bytes: int = 0) -> None:
        """Count more of a caller, or less where a number is negative."""
        for limits in caller.limits:
            _add(self._running, limits.name, running)
        _add(self._body_bytes, caller.tenant, body_bytes)


class Visit:
    """One request that was let in."""

    def __init__(self, in_flight: InFlight, caller: Caller) -> None:
        self.prepaid_tokens = 0
        """Tokens that were charged for the request before its prompt was known."""
        self.text_is_done = False
        """The body has been worked on and is needed no more. What still comes of it is read by nobody."""
        self._in_flight = in_flight
        self._caller = caller
        self._num_running = 0
        self._num_bytes = 0

    def grow(self, num_running: int, param: str = "n") -> None:
        """Count as so many running answers from now on, if that is more than before. `param` is why there are so many.

        Raises InvalidRequestError if the caller may never have so many, and RateLimitError if it may not now.
        """
        more = num_running - self._num_running
        if more > 0:
            self._in_flight.check_running(self._caller, num_running, more, param)
            self._in_flight.count(self._caller, running=more)
            self._num_running = num_running

    def received(self, num_bytes: int) -> None:
        """Count bytes of the body. Raises RateLimitError if the tenant has too many that were not worked on."""
        self._in_flight.check_body_bytes(self._caller.tenant, num_bytes)
        self._in_flight.count(self._caller, body_bytes=num_bytes)
        self._num_bytes += num_bytes

    def text_done(self) -> None:
        """Note that the body has been worked on and is needed no more. Does nothing the second time."""
        self.text_is_done = True
        self._in_flight.count(self._caller, body_bytes=-self._num_bytes)
        self._num_bytes = 0

    def leave(self) -> None:
        """Give back all that the request counts for. Does nothing the second time."""
        self._in_flight.count(self._caller, running=-self._num_running, body_bytes=-self._num_bytes)
        self._num_running = self._num_bytes = 0


def _add(counter: Counter[str], name: str, more: int) -> None:
    counter[name] += more
    if not counter[name]:
        del counter[name]

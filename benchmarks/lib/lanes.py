"""A load of streams that goes on while something is done to the cluster: one request after the other on each lane."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.lib.streams import Answered, Request

_COME_BACK_S = 0.5
"""Between two attempts of a client whose connection has failed."""


@dataclass
class Lanes:
    """The requests one after the other, as many at a time as lanes run, until `over`."""

    client: httpx.AsyncClient
    requests: Sequence[Request]
    answers: list[Answered] = field(default_factory=list)
    """Those that have ended."""
    running: dict[int, Answered] = field(default_factory=dict)
    """By lane."""
    over: bool = False
    _next: int = 0

    def next_request(self) -> Request:
        """The request of the next stream."""
        request = self.requests[self._next % len(self.requests)]
        self._next += 1
        return request

    async def lane(self, number: int) -> None:
        """Run one lane. Returns when the load is over and the lane's last stream has ended."""
        while not self.over:
            self.running[number] = Answered(self.next_request())
            self.answers.append(await self.running[number].run(self.client))

    async def until_flowing(self, deadline_s: float) -> None:
        """Wait until every stream has gone on from now. Raises TimeoutError."""
        now = time.monotonic()
        async with asyncio.timeout(deadline_s):
            while not self._flows_since(now):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def _flows_since(self, then: float) -> bool:
        return all(answer.times and answer.times[-1] > then for answer in self.running.values())


@dataclass
class Counts:
    """What clients did whose connections broke."""

    resumed: int = 0
    asked_anew: int = 0


class ReturningLanes(Lanes):
    """Clients that don't give up: on every other lane they come back to their stream, on the others they ask again."""

    def __init__(self, client: httpx.AsyncClient, requests: Sequence[Request]) -> None:
        super().__init__(client, requests)
        self.counts = Counts()

    async def lane(self, number: int) -> None:
        while not self.over:
            request = self.next_request()
            self.running[number] = Answered(request)
            if number % 2:
                await self._asked_again(number)
            else:
                await self._come_back(number)
            self.answers.append(self.running[number])

    async def _asked_again(self, number: int) -> None:
        """The whole answer over one connection, whichever that is."""
        while (answer := await self.running[number].run(self.client)).failure is not None:
            await self._pause(number, answer)

    async def _come_back(self, number: int) -> None:
        """One answer, over as many connections as it takes."""
        headers = {"x-request-id": uuid.uuid4().hex, "x-tandem-resumable": "true"}
        seen: dict[str, str] = {}
        while (answer := await self.running[number].run(self.client, headers | seen)).failure is not None:
            if not answer.times or "stream_not_found" in answer.failure:
                await self._pause(number, answer)
                seen = {}
                continue
            seen = {"last-event-id": answer.last_event}
            answer.failure = None
            await asyncio.sleep(_COME_BACK_S)
        self.counts.resumed += bool(seen)

    async def _pause(self, number: int, broken: Answered) -> None:
        self.counts.asked_anew += bool(broken.times)
        self.running[number] = Answered(broken.request, asked_at=broken.asked_at)
        await asyncio.sleep(_COME_BACK_S)

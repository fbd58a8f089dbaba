"""The workers that were asked for blocks: a connection to each, opened on first use, and kept alive while it is one of few."""

from __future__ import annotations

import asyncio
import logging

from configs.schema import LimitsConfig
from protocol.calls import CallClient
from protocol.errors import KvTransferError, TandemError, WorkerLostError
from protocol.messages.common import Ping
from protocol.messages.workers import WorkerRef
from protocol.wire import WireClient

log = logging.getLogger(__name__)

MOST_LENDERS = 64
"""Connections that are kept; the one that was used longest ago is closed for another."""


class Lenders:
    """The connections of one worker to those that it fetches from."""

    def __init__(self, secret: bytes, limits: LimitsConfig) -> None:
        self._secret = secret
        self._limits = limits
        self._connections: dict[WorkerRef, asyncio.Task[_Connection]] = {}
        """The one that was used longest ago first."""
        self._closing: set[asyncio.Task[None]] = set()

    async def caller(self, lender: WorkerRef) -> CallClient:
        """Return a working connection to this life of a worker. Concurrent callers share one attempt.

        Raises TandemError if there is none.
        """
        task = self._connections.pop(lender, None)
        if task is not None and _is_lost(task):
            self._close(task)
            task = None
        if task is None:
            task = asyncio.create_task(_Connection.open(lender, self._secret, self._limits))
        self._connections[lender] = task
        while len(self._connections) > MOST_LENDERS:
            self._close(self._connections.pop(next(iter(self._connections))))
        try:
            return (await asyncio.shield(task)).caller
        except asyncio.CancelledError:
            if task.cancelled():
                raise KvTransferError(f"the connection to {lender.worker_id} was given up while it opened") from None
            raise

    def retire_lost(self) -> None:
        """Give back what lost connections hold."""
        for lender, task in list(self._connections.items()):
            if task.done() and _is_lost(task):
                self._close(self._connections.pop(lender))

    async def close(self) -> None:
        """Close all of them."""
        while self._connections:
            self._close(self._connections.popitem()[1])
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _close(self, opening: asyncio.Task[_Connection]) -> None:
        task = asyncio.create_task(_closed(opening))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Connection:
    """One connection, and the tasks that read from it and keep it alive."""

    def __init__(self, client: WireClient, heartbeat_s: float) -> None:
        self.caller = CallClient(client, lambda message: None)
        self._heartbeat_s = heartbeat_s
        self._tasks = [asyncio.create_task(self.caller.run()), asyncio.create_task(self._ping())]

    @classmethod
    async def open(cls, lender: WorkerRef, secret: bytes, limits: LimitsConfig) -> _Connection:
        # Who takes no connection for a lease is as silent as who says nothing for so long.
        client = await WireClient.connect(lender.address, secret, min(limits.connect_s, limits.lease_s))
        return cls(client, limits.heartbeat_s)

    async def close(self) -> None:
        self.caller.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ping(self) -> None:
        while not self.caller.lost:
            try:
                self.caller.send(Ping())
            except WorkerLostError:
                self.caller.close()
                return
            await asyncio.sleep(self._heartbeat_s)


def _is_lost(task: asyncio.Task[_Connection]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None or task.result().caller.lost)


async def _closed(opening: asyncio.Task[_Connection]) -> None:
    opening.cancel()
    try:
        connection = await opening
    except (TandemError, asyncio.CancelledError):
        return
    await connection.close()

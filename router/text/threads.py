"""Threads for long texts: whatever takes long over a text or its tokens must not hold up the loop that serves all streams.

    run ──► WAITING, with the other work of its tenant ──its tenant's turn, and a thread──► RUNNING ──► done

Tenants take turns, one piece of work each, so one that sends many long texts does not hold up the others. No tenant has all
threads, so another one that comes needs not wait for what runs. How much one tenant may have waiting is bounded where requests
are let in (router/access/in_flight.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from protocol.errors import UnavailableError

_THREADS = 3
_THREADS_OF_ONE = 2
"""The most threads that one tenant has at a time."""
_SHORT = 4096
"""Work on up to so many characters, bytes or tokens is done at once: that takes less time than it takes to wake a thread."""

_T = TypeVar("_T")


@dataclass(eq=False)
class _Work:
    tenant: str
    compute: Callable[[], Any]
    done: asyncio.Future[Any]


class TextThreads:
    """A small pool of threads. It is closed by its owner; what waits for a thread by then fails."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tandem-text")
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()
        """By tenant, in the order of their turns; none is empty."""
        self._running: Counter[str] = Counter()
        """Threads by tenant; no entry is 0."""

    async def run(self, tenant: str, work: Callable[..., _T], *args: Any) -> _T:
        """Return `work(*args)`, computed in a thread when it is the tenant's turn.

        Raises UnavailableError if the threads are closed before.
        """
        item = _Work(tenant, partial(work, *args), asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(item)
        self._start()
        try:
            result: _T = await item.done
        finally:
            self._forget(item)
        return result

    async def offload(self, tenant: str, size: int, work: Callable[..., _T], *args: Any) -> _T:
        """Return `work(*args)`, computed in a thread if its `size` (characters, bytes or tokens) would hold up the loop."""
        return work(*args) if size <= _SHORT else await self.run(tenant, work, *args)

    def close(self) -> None:
        """Return when every thread has ended."""
        for item in [item for items in self._waiting.values() for item in items]:
            if not item.done.done():
                item.done.set_exception(_shutting_down())
        self._waiting.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> None:
        """Give free threads to the tenants whose turn it is."""
        while self._running.total() < _THREADS:
            tenant = next((name for name in self._waiting if self._running[name] < _THREADS_OF_ONE), None)
            if tenant is None:
                return
            items = self._waiting.pop(tenant)
            item = items.popleft()
            if items:
                self._waiting[tenant] = items  # behind all others
            self._running[tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, item.compute)
            running.add_done_callback(partial(self._ended, item))

    def _ended(self, item: _Work, running: asyncio.Future[Any]) -> None:
        self._running[item.tenant] -= 1
        if not self._running[item.tenant]:
            del self._running[item.tenant]
        error = _shutting_down() if running.cancelled() else running.exception()
        if not item.done.done():
            if error is not None:
                item.done.set_exception(error)
            else:
                item.done.set_result(running.result())
        if not running.cancelled():
            self._start()

    def _forget(self, item: _Work) -> None:
        """Take out work that nobody waits for any longer, unless a thread has it."""
        items = self._waiting.get(item.tenant)
        if items is not None and item in items:
            items.remove(item)
            if not items:
                del self._waiting[item.tenant]


def _shutting_down() -> UnavailableError:
    """The error of work that is not done. A cancelled future would look as if the task that waits had been cancelled."""
    return UnavailableError("this router is shutting down")

"""The tiers of a worker of several ranks: each writes and reads its own heads of a block.

    first rank: put, get, look ──► itself, and beside that a question to each other rank, which `TierHost` answers there
                match, reset   ──► itself: all ranks of a worker are on one node, and share its folders

A call returns when all ranks are done with it, so that nobody writes into a pool any more. A rank that is lost, or fails, has
read nothing; losing one ends the worker. Shares that were written at different times fit each other as blocks of
different times do: ranks compute the same bits whenever they compute a block, unless their arithmetic varies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import fields, replace
from threading import Lock
from typing import Any, TypeVar

from kv_transfer.remote_lanes import Ask, Handler
from kv_transfer.tiers.node_tiers import NodeTiers
from protocol.cache.shares import TierBlock, TierDone, TierLook, TierLooked, TierOpen, TierRead, TierWrite
from protocol.errors import KvTransferError, TandemError
from protocol.messages.load import TierReport

_Answer = TypeVar("_Answer")


class GangTiers:
    """`node_tiers.Tiers` of a worker's first rank, `own`, and of the others, whom `others` ask. Made on a running loop, which
    the threads that call it leave free.
    """

    def __init__(self, own: NodeTiers, others: Sequence[Ask]) -> None:
        self._own = own
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        """Guards what follows."""
        self._open: set[Future[Any]] = set()
        """Questions that threads wait for."""
        self._closed = False
        self._reports: tuple[TierReport, ...] = ()

    async def open_others(self, arithmetic: str) -> None:
        """Have the other ranks open theirs. `arithmetic` is the worker's. Raises ConfigError if one can't."""
        await asyncio.gather(*(ask(lambda call_id: TierOpen(call_id, arithmetic), TierDone) for ask in self._others))

    @property
    def names(self) -> Sequence[str]:
        """The tiers that there are, the faster first."""
        return self._own.names

    @property
    def num_places(self) -> int:
        """Blocks that the smallest tier can hold."""
        return self._own.num_places

    @property
    def reports(self) -> tuple[TierReport, ...]:
        """What the latest `look` found, by tier: whole blocks that lie there, and what all ranks did with shares of blocks."""
        return self._reports

    def look(self) -> None:
        """Count what lies in the tiers, and let other workers know what was used."""
        asked = self._ask(TierLook, TierLooked)
        self._own.look()
        answers = [answer.reports for answer in self._answers(asked) or ()]
        self._reports = tuple(_summed(own, *theirs) for own, *theirs in zip(self._own.reports, *answers, strict=True))

    def match(self, name: str, keys: Sequence[bytes]) -> int:
        """Number of leading keys whose blocks lie in this tier, as far as is known."""
        return self._own.match(name, keys)

    def put(self, blocks: Sequence[TierBlock]) -> None:
        """Write blocks, which nobody writes meanwhile, into each tier that does not have them."""
        asked = self._ask(lambda call_id: TierWrite(call_id, tuple(blocks)), TierDone)
        try:
            self._own.put(blocks)
        finally:
            self._answers(asked)

    def get(self, name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Read blocks of the caller's own from a tier, one for each key. Returns how many of the first ones all ranks had."""
        asked = self._ask(lambda call_id: TierRead(call_id, name, tuple(keys), tuple(blocks)), TierDone)
        try:
            own = self._own.get(name, keys, blocks)
        finally:
            answers = self._answers(asked)
        return 0 if answers is None else min(own, *(answer.count for answer in answers))

    def reset(self, tenant: str | None) -> int:
        """Erase a tenant's blocks from all tiers, or everybody's. Returns how many.

        Raises UnavailableError if some may be left.
        """
        return self._own.reset(tenant)

    def close(self) -> None:
        """Let go of the first rank's tiers. Whoever waits for another rank goes on without."""
        with self._lock:
            self._closed = True
            asked = list(self._open)
        for each in asked:
            each.cancel()
        self._own.close()

    def _ask(self, build: Callable[[int], Any], kind: type[_Answer]) -> list[Future[_Answer]] | None:
        """Ask all other ranks, from a thread. None once it is closed."""

        async def answered(ask: Ask) -> _Answer:
            answer: _Answer = await ask(build, kind, until_lost=True)
            return answer

        with self._lock:
            if self._closed:
                return None
            asked = [asyncio.run_coroutine_threadsafe(answered(ask), self._loop) for ask in self._others]
            self._open.update(asked)
        return asked

    def _answers(self, asked: Sequence[Future[_Answer]] | None) -> list[_Answer] | None:
        """What the others answered, once all have; None if one did not."""
        if asked is None:
            return None
        wait(asked)
        with self._lock:
            self._open.difference_update(asked)
        try:
            return [each.result() for each in asked]
        except (TandemError, CancelledError):
            return None


class TierHost:
    """Serves the tiers of a rank that is not its worker's first. `handlers` answer questions, by type. `open_own` opens them,
    given the name of the whole worker's arithmetic, and `be_nice` lowers the priority of the thread that calls it.
    """

    def __init__(self, open_own: Callable[[str], NodeTiers], be_nice: Callable[[], None]) -> None:
        self._open_own = open_own
        self._tiers: NodeTiers | None = None
        self._writing = ThreadPoolExecutor(1, "kv-offload", be_nice)
        self.handlers: dict[type[Any], Handler] = {
            TierOpen: self._open,
            TierRead: self._read,
            TierWrite: self._write,
            TierLook: self._look,
        }

    def close(self) -> None:
        """Let go of the tiers."""
        self._writing.shutdown(wait=False, cancel_futures=True)
        if self._tiers is not None:
            self._tiers.close()

    async def _open(self, message: TierOpen) -> TierDone:
        self._tiers = await asyncio.to_thread(self._open_own, message.arithmetic)
        return TierDone(message.call_id, 0)

    async def _read(self, message: TierRead) -> TierDone:
        count = await asyncio.to_thread(self._opened.get, message.tier, message.keys, message.blocks)
        return TierDone(message.call_id, count)

    async def _write(self, message: TierWrite) -> TierDone:
        await self._to_writing(self._opened.put, message.blocks)
        return TierDone(message.call_id, 0)

    async def _look(self, message: TierLook) -> TierLooked:
        await self._to_writing(self._opened.look)
        return TierLooked(message.call_id, self._opened.reports)

    def _to_writing(self, work: Callable[..., None], *what: Any) -> Awaitable[None]:
        return asyncio.get_running_loop().run_in_executor(self._writing, work, *what)

    @property
    def _opened(self) -> NodeTiers:
        if self._tiers is None:
            raise KvTransferError("the tiers are not open")
        return self._tiers


def _summed(own: TierReport, *others: TierReport) -> TierReport:
    """What lies in the first rank's tier, and what all ranks did with theirs."""
    counted = [field.name for field in fields(TierReport) if field.name not in ("name", "num_blocks", "num_bytes")]
    return replace(own, **{name: sum(getattr(each, name) for each in (own, *others)) for name in counted})

"""Lanes that end in another process of the same worker: the first rank asks, the rank with the pool does it.

`RemoteSendRank` and `RemoteReceiveRank` are the first rank's view of another rank; `SendHost` and `ReceiveHost` answer there,
by a `LocalSendRank` or `LocalReceiveRank` of theirs, and `LaneHost` by both. An error of the other rank, and its loss, is a
broken lane here.

A push ends here when it has ended there, where each of its messages has a deadline: until then the rank writes into the blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from kv_transfer.lanes import Exchange, LocalReceiveRank, LocalSendRank, ReceiveLane, ReceiveRank, SendLane, SendRank
from kv_transfer.progress import StepProgress
from kv_transfer.transport import ReceiveTransport, SendTransport, TransportError
from protocol.errors import KvTransferError, TandemError, TransportUnavailableError, first_line
from protocol.gang import (
    HeadMove,
    LaneAccept,
    LaneAwait,
    LaneClose,
    LaneClosed,
    LaneConnect,
    LaneConnected,
    LaneDone,
    LaneOffer,
    LaneOffered,
    LaneReceive,
    LaneSend,
    TokenSpan,
)

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_Lane = TypeVar("_Lane", SendLane, ReceiveLane)
_lane_ids = itertools.count(1)

Handler = Callable[[Any], Awaitable[Any]]


class Ask(Protocol):
    """Asks a rank a question."""

    def __call__(self, build: Callable[[int], Any], kind: type[Any], *, until_lost: bool = False) -> Awaitable[Any]:
        """Ask what `build` makes from a call id, and return the answer, which is a `kind`. Raises TandemError.

        An answer is due in the time of a step, or, with `until_lost`, whenever the rank gives it.
        """


class RemoteSendRank:
    """A sending rank in another process, which has these transports."""

    def __init__(self, ask: Ask, transports: Sequence[str]) -> None:
        self._ask = ask
        self.transports = transports

    async def connect(self, move: HeadMove, transport: str, exchange: Exchange) -> SendLane:
        """Have the rank connect one lane. Raises TransportError, or what `exchange` raised."""
        lane = _RemoteLane(self._ask)
        try:
            offered = await lane.ask(lambda call_id: LaneOffer(call_id, lane.id, move, transport), LaneOffered)
            answer = await exchange(offered.rendezvous)
            await lane.ask(lambda call_id: LaneConnect(call_id, lane.id, answer), LaneConnected)
        except BaseException:
            await lane.close()
            raise
        return lane


class RemoteReceiveRank:
    """A receiving rank in another process, which has these transports."""

    def __init__(self, ask: Ask, transports: Sequence[str]) -> None:
        self._ask = ask
        self.transports = transports

    async def accept(self, move: HeadMove, transport: str, offer: bytes, answer: Callable[[bytes], None]) -> ReceiveLane:
        """Have the rank connect one lane that a peer has offered.

        Raises TransportUnavailableError or TransportError if it fails before it has answered, and TransportError after that.
        """
        lane = _RemoteLane(self._ask)
        try:
            offered = await lane.ask(lambda call_id: LaneAccept(call_id, lane.id, move, transport, offer), LaneOffered)
            answer(offered.rendezvous)
            await lane.ask(lambda call_id: LaneAwait(call_id, lane.id), LaneConnected)
        except BaseException:
            await lane.close()
            raise
        return lane


class _RemoteLane:
    """Either end, as the first rank sees it."""

    def __init__(self, ask: Ask) -> None:
        self.id = next(_lane_ids)
        self._ask = ask

    async def ask(self, build: Callable[[int], Any], kind: type[_Answer], *, until_lost: bool = False) -> _Answer:
        try:
            answer: _Answer = await self._ask(build, kind, until_lost=until_lost)
        except TransportUnavailableError:
            raise
        except TandemError as error:
            raise TransportError(error.message) from None
        return answer

    async def send(self, step: int, spans: Sequence[TokenSpan]) -> list[bytes]:
        done = await self.ask(lambda call_id: LaneSend(call_id, self.id, step, tuple(spans)), LaneDone, until_lost=True)
        return list(done.digests)

    async def receive(self, spans: Sequence[TokenSpan]) -> list[bytes]:
        done = await self.ask(lambda call_id: LaneReceive(call_id, self.id, tuple(spans)), LaneDone, until_lost=True)
        return list(done.digests)

    async def close(self) -> None:
        with contextlib.suppress(TransportError):  # then it went with its rank
            await self.ask(lambda call_id: LaneClose(call_id, self.id), LaneClosed)


class _Host(Generic[_Lane]):
    """The lanes of this rank that are driven from the first, from the moment that they begin to connect."""

    def __init__(self) -> None:
        self._lanes: dict[int, asyncio.Task[_Lane]] = {}

    async def close(self) -> None:
        for lane in list(self._lanes):
            await self._end(lane)

    async def _begin(self, lane: int, connecting: Coroutine[Any, Any, _Lane], ours: asyncio.Future[bytes]) -> bytes:
        """Our address material, as soon as the transport has it."""
        task = self._lanes[lane] = asyncio.create_task(connecting)
        await asyncio.wait((ours, task), return_when=asyncio.FIRST_COMPLETED)
        if not ours.done():
            await _moved(task)
        return ours.result()

    async def _connected(self, lane: int) -> _Lane:
        if lane not in self._lanes:
            raise KvTransferError(f"there is no lane {lane}")
        return await _moved(asyncio.shield(self._lanes[lane]))

    async def _closed(self, message: LaneClose) -> LaneClosed:
        await self._end(message.lane)
        return LaneClosed(message.call_id)

    async def _end(self, lane: int) -> None:
        connecting = self._lanes.pop(lane, None)
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait((connecting,))
            if not connecting.cancelled() and connecting.exception() is None:
                await connecting.result().close()


class SendHost(_Host[SendLane]):
    """Serves a sending rank of this process to the worker's first rank. `handlers` answer questions, by type."""

    def __init__(self, rank: LocalSendRank) -> None:
        super().__init__()
        self._rank = rank
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        """The peers', of lanes that connect."""
        self.handlers: dict[type[Any], Handler] = {
            LaneOffer: self._offer,
            LaneConnect: self._connect,
            LaneSend: self._send,
            LaneClose: self._closed,
        }

    async def _offer(self, message: LaneOffer) -> LaneOffered:
        ours: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        theirs: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[message.lane] = theirs

        async def exchange(offer: bytes) -> bytes:
            ours.set_result(offer)
            return await theirs

        connecting = self._rank.connect(message.move, message.transport, exchange)
        return LaneOffered(message.call_id, await self._begin(message.lane, connecting, ours))

    async def _connect(self, message: LaneConnect) -> LaneConnected:
        theirs = self._answers.get(message.lane)
        if theirs is not None and not theirs.done():
            theirs.set_result(message.rendezvous)
        await self._connected(message.lane)
        return LaneConnected(message.call_id)

    async def _send(self, message: LaneSend) -> LaneDone:
        lane = await self._connected(message.lane)
        return LaneDone(message.call_id, tuple(await _moved(lane.send(message.step, message.spans))))

    async def _end(self, lane: int) -> None:
        theirs = self._answers.pop(lane, None)
        if theirs is not None:
            theirs.cancel()
        await super()._end(lane)


class ReceiveHost(_Host[ReceiveLane]):
    """Serves a receiving rank of this process to the worker's first rank. `handlers` answer questions, by type."""

    def __init__(self, rank: LocalReceiveRank) -> None:
        super().__init__()
        self._rank = rank
        self.handlers: dict[type[Any], Handler] = {
            LaneAccept: self._accept,
            LaneAwait: self._await,
            LaneReceive: self._receive,
            LaneClose: self._closed,
        }

    async def _accept(self, message: LaneAccept) -> LaneOffered:
        ours: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        connecting = self._rank.accept(message.move, message.transport, message.rendezvous, ours.set_result)
        return LaneOffered(message.call_id, await self._begin(message.lane, connecting, ours))

    async def _await(self, message: LaneAwait) -> LaneConnected:
        await self._connected(message.lane)
        return LaneConnected(message.call_id)

    async def _receive(self, message: LaneReceive) -> LaneDone:
        lane = await self._connected(message.lane)
        return LaneDone(message.call_id, tuple(await _moved(lane.receive(message.spans))))


class LaneHost:
    """Serves both kinds of lanes of this process to the worker's first rank. `handlers` answer questions, by type."""

    def __init__(self, sending: LocalSendRank, receiving: LocalReceiveRank) -> None:
        self._hosts = SendHost(sending), ReceiveHost(receiving)
        leaving, arriving = self._hosts
        self.handlers: dict[type[Any], Handler] = {**arriving.handlers, **leaving.handlers, LaneClose: self._close_lane}

    async def close(self) -> None:
        """End all lanes."""
        for host in self._hosts:
            await host.close()

    async def _close_lane(self, message: LaneClose) -> LaneClosed:
        """Lanes of both kinds are numbered together; what one host does not know it has closed."""
        for host in self._hosts:
            await host.handlers[LaneClose](message)
        return LaneClosed(message.call_id)


def send_ranks(
    layers: Sequence[Tensor],
    block_size: int,
    transports: Sequence[SendTransport],
    others: Sequence[Ask],
    lease_s: float,
    progress: StepProgress,
) -> list[SendRank]:
    """The sending ranks of one worker: the first rank, whose pool `layers` are, and those of its gang, whom `others` ask.

    `progress` tells what the first rank's engine has computed.
    """
    first = LocalSendRank(layers, block_size, transports, progress, lease_s)
    return [first, *(RemoteSendRank(ask, first.transports) for ask in others)]


def receive_ranks(
    layers: Sequence[Tensor], block_size: int, transports: Sequence[ReceiveTransport], others: Sequence[Ask], deadline_s: float
) -> list[ReceiveRank]:
    """The receiving ranks of one worker: the first rank, whose pool `layers` are, and those of its gang, whom `others` ask."""
    first = LocalReceiveRank(layers, block_size, transports, deadline_s)
    return [first, *(RemoteReceiveRank(ask, first.transports) for ask in others)]


async def _moved(moving: Awaitable[_Answer]) -> _Answer:
    """What a lane does, with errors that can be sent."""
    try:
        return await moving
    except TransportError as error:
        raise KvTransferError(str(error)) from None
    except TandemError:
        raise
    except Exception as error:  # want of memory, for instance: it costs the pair, not the gang
        log.exception("a lane failed")
        raise KvTransferError(first_line(error)) from None

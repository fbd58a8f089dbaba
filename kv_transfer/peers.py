"""The decode workers that a worker sends to: one SendingPair each, opened on first use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from configs.schema import LimitsConfig
from kv_transfer.lanes import SendRank
from kv_transfer.sender import SendingPair
from protocol.audit import PairRow
from protocol.errors import InvalidRequestError, KvTransferError, TandemError
from protocol.messages.workers import KvLayout, WorkerRef

log = logging.getLogger(__name__)


class DecodePeers:
    """The pairs with the decode workers that this worker sends to. A broken pair, or one with a former life of a worker, is
    closed and replaced.
    """

    def __init__(
        self,
        me: WorkerRef,
        secret: bytes,
        layout: KvLayout,
        head_bytes: int,
        ranks: Sequence[SendRank],
        limits: LimitsConfig,
    ) -> None:
        """`head_bytes` are those of the K and V of one token and one KV head in all layers."""
        self._me = me
        self._secret = secret
        self._layout = layout
        self._head_bytes = head_bytes
        self._ranks = ranks
        self._limits = limits
        self._pairs: dict[WorkerRef, asyncio.Task[SendingPair]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.sent_bytes = 0
        """Bytes of KV that have left for other workers since start, over all pairs that there ever were."""

    async def pair(self, peer: WorkerRef) -> SendingPair:
        """Return a working pair with this worker, opened if need be. Concurrent callers share one attempt.

        Raises TandemError if it can't be opened.
        """
        if peer.address == self._me.address:
            raise InvalidRequestError(f"{peer.worker_id} can't hand KV over to itself")
        task = self._pairs.get(peer)
        if task is None or _is_broken(task):
            self._retire(peer)
            task = self._pairs[peer] = asyncio.create_task(self._open(peer))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise KvTransferError(f"the pair to {peer.worker_id} was given up while it opened") from None
            raise

    @property
    def pushes_in_flight(self) -> int:
        """Number of pushes under way, over all working pairs."""
        tasks = [task for task in self._pairs.values() if task.done() and not _is_broken(task)]
        return sum(task.result().pushes_in_flight for task in tasks)

    def books(self) -> tuple[PairRow, ...]:
        """One row for every pair that was opened, also if it has broken since."""
        opened = {ref: task.result() for ref, task in self._pairs.items() if _is_open(task)}
        return tuple(PairRow(ref.worker_id, ref.epoch, pair.pushes_in_flight) for ref, pair in opened.items())

    def retire_broken(self) -> None:
        """Give back what dead pairs hold, whether or not anybody asks for that peer again."""
        for peer, task in list(self._pairs.items()):
            if task.done() and _is_broken(task):
                self._retire(peer)

    async def close(self) -> None:
        """Close every pair; returns when all are closed."""
        for peer in list(self._pairs):
            self._retire(peer)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _open(self, peer: WorkerRef) -> SendingPair:
        pair = await SendingPair.open(
            self._me,
            peer,
            self._secret,
            self._layout,
            self._ranks,
            head_bytes=self._head_bytes,
            on_sent=self._sent,
            connect_s=self._limits.connect_s,
            lease_s=self._limits.lease_s,
            heartbeat_s=self._limits.heartbeat_s,
        )
        # Not before: who only claims to be another life of a worker must not part us from it.
        others = [ref for ref in self._pairs if ref.worker_id == peer.worker_id and ref != peer]
        for former in [ref for ref in others if ref.epoch <= peer.epoch]:
            self._retire(former)
        return pair

    def _sent(self, num_bytes: int) -> None:
        self.sent_bytes += num_bytes

    def _retire(self, peer: WorkerRef) -> None:
        opening = self._pairs.pop(peer, None)
        if opening is not None:
            task = asyncio.create_task(_close(opening))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _is_open(task: asyncio.Task[SendingPair]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _is_broken(task: asyncio.Task[SendingPair]) -> bool:
    return task.done() and not (_is_open(task) and not task.result().broken)


async def _close(opening: asyncio.Task[SendingPair]) -> None:
    opening.cancel()
    try:
        pair = await opening
    except (TandemError, asyncio.CancelledError):
        return
    await pair.close()

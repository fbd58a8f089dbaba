"""The borrower's side of a fetch: blocks of its own pool that another worker fills.

    OPEN ──begin_push──► being filled ──commit: fingerprints are equal──► COMMITTED ──► closed: nothing writes any more
      └───────── refused, damaged, the lender is lost, no answer in time ──────────────┘

A loan is to its lender what a ticket of a decode worker is to a prefill worker, with the same proof. Who frees: whoever called
`fetch`, when it has returned or raised; until then a push may still write into the blocks.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.fetching.lenders import Lenders
from protocol.cache.fetch import Fetch, Fetched
from protocol.calls import expect
from protocol.errors import KvTransferError
from protocol.messages.workers import Ticket, WorkerRef

_LONGEST_S = 3600.0
"""Last resort: a lender that goes on bringing is waited for."""


@dataclass(eq=False)
class _Loan:
    transfer_id: int
    block_table: tuple[int, ...]
    end: int
    """Number of leading tokens that are wanted."""
    announced_tokens: int
    received_tokens: int
    """Number of leading tokens that were there before or have arrived."""
    open: bool = True
    """Whether more of it may come."""
    committed: bool = False
    mixed: bool = False
    """Some of it was computed by another arithmetic: it is not taken."""
    pushes_in_flight: int = 0
    unwritten: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no push is under way."""
    digests: defaultdict[int, bytes] = field(default_factory=lambda: defaultdict(bytes))

    def __post_init__(self) -> None:
        self.unwritten.set()

    def arrived(self, lane: int, digests: bytes) -> None:
        """Add the fingerprints of what a push has brought on this lane."""
        self.digests[lane] += digests


class Borrower:
    """The loans of one worker; for those who fill them it is the `TransferBooks` of `kv_transfer.receiver`."""

    def __init__(self, me: WorkerRef, block_size: int, lenders: Lenders, patience_s: float, ids: Iterator[int]) -> None:
        """A lender may be silent for `patience_s` seconds. `ids` are the loans': tickets of the worker have others."""
        self._me = me
        self._block_size = block_size
        self._lenders = lenders
        self._patience_s = patience_s
        self._loans: dict[int, _Loan] = {}
        self._ids = ids

    async def fetch(
        self,
        lender: WorkerRef,
        keys: Sequence[bytes],
        block_table: Sequence[int],
        held_blocks: int,
        on_progress: Callable[[], None],
    ) -> int:
        """Have a worker fill all but the first `held_blocks` of these blocks, one for each key. Returns how many leading blocks
        hold what they should by now. `on_progress` is called while more and more of it comes.

        Raises TandemError if nothing of it can be had. Afterwards nothing writes into the blocks, either way.
        """
        assert held_blocks < len(keys) == len(block_table), "there is something to fetch, and room for it"
        held, end = held_blocks * self._block_size, len(keys) * self._block_size
        ticket_id, transfer_id = next(self._ids), secrets.randbits(63)
        loan = self._loans[ticket_id] = _Loan(transfer_id, tuple(block_table), end, held, held)
        ticket = Ticket(ticket_id, transfer_id, self._me, self._block_size, loan.block_table, end, held)
        try:
            caller = await self._lenders.caller(lender)
            asking = asyncio.create_task(caller.ask(lambda call_id: Fetch(call_id, ticket, tuple(keys)), _LONGEST_S))
            fetched = expect(await self._answer(asking, loan, lender, on_progress), Fetched)
            if not loan.committed or fetched.num_tokens != loan.received_tokens:
                raise KvTransferError(f"{lender.worker_id} says that it sent what has not come")
            return loan.received_tokens // self._block_size
        finally:
            loan.open = False
            await loan.unwritten.wait()
            del self._loans[ticket_id]

    async def _answer(
        self, asking: asyncio.Task[object], loan: _Loan, lender: WorkerRef, on_progress: Callable[[], None]
    ) -> object:
        """The lender's answer. Raises KvTransferError when it has brought nothing for as long as patience lasts."""
        looked_again = False
        try:
            while not asking.done():
                before, began = loan.received_tokens, time.monotonic()
                await asyncio.wait((asking,), timeout=self._patience_s)
                if asking.done():
                    break
                if loan.received_tokens == before:
                    was_held = time.monotonic() - began > 1.5 * self._patience_s  # what has come was not looked at yet
                    if looked_again or not was_held:
                        raise KvTransferError(f"{lender.worker_id} brings nothing for {self._patience_s:g} s")
                    looked_again = True
                on_progress()
            return asking.result()
        finally:
            asking.cancel()

    # -- what `kv_transfer.receiver` tells ---------------------------------------------------------------------------

    def begin_push(
        self, source: bytes, ticket_id: int, transfer_id: int, start: int, num_tokens: int, added: tuple[int, ...]
    ) -> _Loan | None:
        """Open a push of tokens [start, start + num_tokens). Returns None to refuse it. Pushes of one loan come in order."""
        loan = self._find(ticket_id, transfer_id)
        if loan is None or loan.committed or added or num_tokens < 1:
            return None
        if start != loan.announced_tokens or start + num_tokens > loan.end:
            return None
        loan.announced_tokens += num_tokens
        loan.pushes_in_flight += 1
        loan.unwritten.clear()
        return loan

    def end_push(self, ticket_id: int, num_tokens: int, ok: bool) -> None:
        """End a push. If it failed, no more of its loan is taken."""
        loan = self._loans[ticket_id]
        loan.pushes_in_flight -= 1
        if ok:
            loan.received_tokens += num_tokens
        else:
            loan.open = False
        if not loan.pushes_in_flight:
            loan.unwritten.set()

    def fingerprints(self, ticket_id: int, transfer_id: int) -> Mapping[int, bytes] | None:
        """Fingerprints of what has arrived for this loan, by lane. None if it is gone."""
        loan = self._find(ticket_id, transfer_id)
        return None if loan is None else loan.digests

    def commit(self, ticket_id: int, transfer_id: int, num_tokens: int) -> bool:
        """Close a loan whose fingerprints were checked. False if something is missing or it is gone. Its lender may have had
        less than was wanted, in whole blocks."""
        loan = self._find(ticket_id, transfer_id)
        if (
            loan is None
            or loan.mixed
            or loan.pushes_in_flight
            or num_tokens != loan.received_tokens
            or num_tokens % self._block_size
        ):
            return False
        loan.committed = True
        return True

    def abort_transfer(self, ticket_id: int, transfer_id: int) -> None:
        """Take no more of a loan whose lender gives it up. Without effect if it was committed before."""
        loan = self._find(ticket_id, transfer_id)
        if loan is not None and not loan.committed:
            loan.open = False

    def _find(self, ticket_id: int, transfer_id: int) -> _Loan | None:
        loan = self._loans.get(ticket_id)
        return loan if loan is not None and loan.transfer_id == transfer_id and loan.open else None

"""From a router's Attach to a stream in the batch.

    Attach ──► checked ──► WAITING for its KV and its grammar ──► started: the ticket is ATTACHED, the router hears Attached
                                          └── ticket gone, grammar refused ──► Failed

With a first token the stream goes on with KV that a prefill worker sends, so it waits for the commit. Without one nothing is
sent: what is not held of the prompt is computed here, and only a grammar can keep the stream waiting, or blocks that are read
from a tier.

Who frees: the ledger. A stream that has not started holds nothing but its ticket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Coroutine, MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.facts import ModelFacts
from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler
from decode_workers.stream import LocalPrefill, Stream
from decode_workers.ticket_entry import TicketEntry
from engine.grammar import Constraint, Grammars
from engine.scoring import PromptScores
from kv_transfer.tiers.overdue import Overdue
from protocol.errors import ContextLengthError, InvalidRequestError, KvTransferError, TandemError
from protocol.messages.common import Failed
from protocol.messages.decode import Attach, Attached
from protocol.messages.load import NOTHING_BROUGHT, Brought
from protocol.sampling import MAX_PROMPT_LOGPROBS
from protocol.ticket import TicketState
from telemetry.logging import fields

if TYPE_CHECKING:  # only where tiers are configured are they imported
    from kv_transfer.tiers.reader import TierReader

log = logging.getLogger(__name__)


@dataclass
class _Waiting:
    message: Attach
    asked: float
    """When, on `time.monotonic`."""
    constraint: Constraint | None = None
    reading: bool = False
    """Blocks of a tier are being read for it."""
    brought: Brought = NOTHING_BROUGHT
    """What came from there."""
    waited_s: float | None = None
    """Seconds that the attach waited for the KV; None as long as the KV is not here."""

    @property
    def here(self) -> bool:
        """The prompt is computed here."""
        return self.message.first_token is None

    @property
    def ready(self) -> bool:
        return not self.reading and (self.constraint is not None or not self.message.sampling.grammar)

    @property
    def num_scores(self) -> int | None:
        """How many alternatives are wanted beside each token of a prompt that is computed here; None if no logprobs are."""
        return self.message.sampling.num_prompt_logprobs if self.here and not self.message.num_generated else None

    def note_kv(self, entry: TicketEntry) -> None:
        if self.waited_s is None and entry.state is TicketState.COMMITTED:
            self.waited_s = time.monotonic() - self.asked

    def answer(self, entry: TicketEntry) -> tuple[int, ...]:
        """The answer's tokens so far."""
        first = () if self.message.first_token is None else (self.message.first_token,)
        return (*entry.token_ids[len(entry.token_ids) + len(first) - self.message.num_generated :], *first)

    def token_ids(self, entry: TicketEntry) -> MutableSequence[int]:
        """What the stream starts with.

        Penalties read it at each token: an array in place, while a list of 131,072 tokens takes NumPy 7 ms. To make an array
        takes some milliseconds, too, which other streams are spared.
        """
        penalizes = self.message.sampling.penalizes
        token_ids: MutableSequence[int] = array("q", entry.token_ids) if penalizes else list(entry.token_ids)
        if self.message.first_token is not None:
            token_ids.append(self.message.first_token)
        return token_ids


class Attaches:
    """All streams of one worker that have been attached and have not started.

    `spawn` runs a task for as long as the worker. `on_change` is called when a stream has started.
    """

    def __init__(
        self,
        facts: ModelFacts,
        block_size: int,
        grammars: Grammars,
        ledger: Ledger,
        scheduler: DecodeScheduler,
        send: Callable[[bytes, Any], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_change: Callable[[], None],
        reader: TierReader | None,
    ) -> None:
        """`reader` reads the tiers of the node, if it has some."""
        self._facts = facts
        self._block_size = block_size
        self._grammars = grammars
        self._ledger = ledger
        self._scheduler = scheduler
        self._send = send
        self._spawn = spawn
        self._on_change = on_change
        self._waiting: dict[int, _Waiting] = {}
        """By ticket."""
        self._reader = reader
        self.brought = NOTHING_BROUGHT
        """What came out of tiers since start."""

    def ask(self, router: bytes, message: Attach) -> None:
        """Take a router's Attach. It is answered at once, when the stream starts, or when its ticket fails, unless it is
        forgotten.
        """
        waiting = _Waiting(message, time.monotonic())
        try:
            entry = self._checked(router, waiting)
        except TandemError as error:
            self._send(router, Failed.from_error(message.call_id, error))
            return
        self._waiting[message.ticket_id] = waiting
        if message.sampling.grammar:
            self._spawn(self._constrain(entry, waiting))
        if self._reader is not None and waiting.here and waiting.num_scores is None:
            waiting.reading = True
            self._spawn(self._read(self._reader, entry, waiting))
        self.start_if_ready(entry)

    def start_if_ready(self, entry: TicketEntry) -> None:
        """Start the ticket's stream if its router has attached it, its grammar is ready, and its KV is here or not to come."""
        waiting = self._waiting.get(entry.ticket_id)
        if waiting is None:
            return
        waiting.note_kv(entry)
        if not waiting.ready:
            return
        if waiting.here and entry.state is not TicketState.RESERVED:
            self._ledger.abort(entry.ticket_id)  # somebody sends KV for it all the same
            return
        attached = self._scheduler.attached
        if (attached.attach_here if waiting.here else attached.attach)(entry.ticket_id) is None:
            return  # the commit will come, or the lease ends
        del self._waiting[entry.ticket_id]
        self.brought += waiting.brought
        tokens = {"tokens": len(entry.token_ids), "held": entry.held_tokens, "here": waiting.here}
        log.info("attached", extra=fields(trace=entry.trace_id, ticket=entry.ticket_id, **tokens))
        # First: where the router turns out to be gone, its streams end within this call.
        self._scheduler.add(self._stream(entry, waiting))
        self._send(entry.owner, Attached(waiting.message.call_id, waiting.waited_s or 0.0))
        self._on_change()

    def failed(self, entry: TicketEntry, error: TandemError) -> None:
        """Tell the router that its stream will not start, because the ledger gave the ticket up."""
        waiting = self._waiting.pop(entry.ticket_id, None)
        if waiting is not None:
            self._send(entry.owner, Failed.from_error(waiting.message.call_id, error))

    def forget(self, ticket_id: int) -> None:
        """Drop a stream that has not started, because its router has released the ticket. Idempotent."""
        self._waiting.pop(ticket_id, None)

    def waiting(self) -> dict[int, bool]:
        """Tickets of the streams that have not started; the value tells whether the prompt is computed here."""
        return {ticket_id: waiting.here for ticket_id, waiting in self._waiting.items()}

    def _checked(self, router: bytes, waiting: _Waiting) -> TicketEntry:
        message = waiting.message
        message.sampling.check(self._facts.vocab_size)
        entry = self._ledger.find(message.ticket_id)
        if entry is None or entry.owner != router:
            raise KvTransferError("the ticket is gone")
        if entry.state is TicketState.ATTACHED or message.ticket_id in self._waiting:
            raise InvalidRequestError("the ticket is attached already")
        emitted = message.num_generated - (message.first_token is not None)
        if not 0 <= emitted <= len(entry.token_ids):
            raise InvalidRequestError(f"an answer of {message.num_generated} tokens doesn't fit to this ticket")
        if message.sampling.max_tokens - emitted > entry.max_tokens:
            raise InvalidRequestError("the answer is longer than the reservation", param="max_tokens")
        if message.first_token is None:
            self._check_prefill(entry, waiting)
        elif not 0 <= message.first_token < self._facts.vocab_size:
            raise InvalidRequestError(f"token id {message.first_token} is outside the vocabulary")
        return entry

    def _check_prefill(self, entry: TicketEntry, waiting: _Waiting) -> None:
        """Of a prompt that is to be computed here."""
        num_tokens, num_scores = len(entry.token_ids), waiting.num_scores
        if entry.state is not TicketState.RESERVED:
            raise KvTransferError("somebody sends KV for this ticket")
        if num_tokens >= self._facts.max_model_len:
            raise ContextLengthError(f"{num_tokens} prompt tokens don't fit into {self._facts.max_model_len}", param="prompt")
        if not self._scheduler.attached.computable(entry) or (num_scores is not None and entry.held_tokens):
            raise InvalidRequestError("the ticket is not for a prompt that is computed here: reserve with `own_tokens`")
        if num_tokens * (1 + (num_scores or 0)) > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(f"more than {MAX_PROMPT_LOGPROBS} logprobs of a prompt", param="logprobs")

    async def _constrain(self, entry: TicketEntry, waiting: _Waiting) -> None:
        """Bring the answer's grammar to the state after what there is of it; until then the stream waits."""
        try:
            waiting.constraint = await self._grammars.constraint(waiting.message.sampling.grammar, waiting.answer(entry))
        except TandemError as error:
            self.failed(entry, error)
        else:
            self.start_if_ready(entry)

    async def _read(self, reader: TierReader, entry: TicketEntry, waiting: _Waiting) -> None:
        """Read what tiers have of a prompt that is computed here into the ticket's own blocks; until then the stream waits."""
        keys = entry.keys[: min((len(entry.token_ids) - 1) // self._block_size, len(entry.block_table))]
        for name in reader.names:
            held = entry.held_tokens // self._block_size
            began = time.monotonic()
            end = held + (await reader.match(name, keys[held:]) if held < len(keys) and reader.pays(name) else 0)
            if end == held or not self._ledger.begin_fill(entry.ticket_id):
                continue
            filled = 0
            try:
                filled = await reader.read(name, keys[held:end], entry.block_table[held:end])
            except Overdue as overdue:
                await self._give_up(entry, overdue)
                return
            self._ledger.end_fill(entry.ticket_id, (held + filled) * self._block_size)
            waiting.brought += Brought.of(name, filled * self._block_size, time.monotonic() - began)
        waiting.reading = False
        self.start_if_ready(entry)

    async def _give_up(self, entry: TicketEntry, overdue: Overdue) -> None:
        """A tier hangs in the middle of a read: the router asks elsewhere, and the ticket keeps its blocks until it lets go."""
        self._ledger.abort(entry.ticket_id)
        await asyncio.wait((overdue.reading,))
        self._ledger.end_fill(entry.ticket_id, entry.held_tokens)

    def _stream(self, entry: TicketEntry, waiting: _Waiting) -> Stream:
        message, prefill = waiting.message, None
        if waiting.here:
            scores = None if waiting.num_scores is None else PromptScores(entry.token_ids, waiting.num_scores)
            prefill = LocalPrefill(entry.held_tokens, scores, waiting.brought)
        return Stream(
            ticket_id=entry.ticket_id,
            owner=entry.owner,
            block_table=entry.block_table,
            sampling=message.sampling,
            token_ids=waiting.token_ids(entry),
            num_generated=message.num_generated,
            computed=entry.held_tokens if waiting.here else len(entry.token_ids),
            constraint=waiting.constraint,
            prefill=prefill,
            share=entry.share,
        )

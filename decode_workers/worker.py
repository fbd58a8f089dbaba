"""The decode role: tickets in, KV received, streams through the engine, token frames out.

    Reserve ──► ledger ──► pushes (kv_transfer) ──► commit ──► Attach ──► step loop ──► frames ──► finished or Release
                   └───────── nothing is sent: the prompt is computed here ──┘
                                                                              ├── Copy ──► pushes to another, and stays
                                                                              └── Migrate ──► pushes to another ──► gone

Everything here runs on one asyncio loop, so the books need no locks; the engine computes in a thread of its own, and each
lane's bytes move in one of theirs. A ticket's blocks are given back by its books alone: the ledger and `AttachedTickets`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from decode_workers.attaches import Attaches
from decode_workers.books import decode_books
from decode_workers.ledger import Ledger
from decode_workers.migrations import Migrations
from decode_workers.outbox import Outbox
from decode_workers.reservations import Reservations
from decode_workers.scheduler import DecodeScheduler
from decode_workers.step_loop import StepLoop
from decode_workers.ticket_entry import TicketEntry
from engine.engine_thread import EngineThread
from protocol.endpoint import Handler, Listening
from protocol.errors import KvTransferError
from protocol.messages.common import Failed, Ping
from protocol.messages.decode import Attach, Copy, Migrate, Release, Reserve, StreamOutput
from protocol.messages.load import DecodeLoad
from protocol.messages.workers import VARIES, Role
from telemetry.logging import fields
from worker.core import WorkerCore
from worker.roles import RoleBooks, RoleLoad

if TYPE_CHECKING:  # imported only where tokens are guessed
    from decode_workers.speculation.speculator import Speculator

log = logging.getLogger(__name__)


class DecodeWorker:
    """The decode role of one worker: it grants tickets, receives KV, computes prompts of its own and streams."""

    role = Role.DECODE

    def __init__(self, core: WorkerCore) -> None:
        limits, spawn, changed = core.config.limits, core.spawn, core.changed
        self.core = core
        self.me = core.me
        self._send = core.endpoint.send
        self._cache = core.cache
        self.ledger = Ledger(
            core.cache,
            core.block_size,
            limits.lease_s,
            time.monotonic,
            on_committed=self._committed,
            on_failed=self._failed,
            on_settled=changed,
            on_released=None if core.tiers is None else core.tiers.note,
            ids=core.ids,
            window=core.window,
            step_tokens=core.config.chunk_tokens,
            beside=lambda shared: core.growth_beside(self, shared) or 0,
        )
        self._listening = Listening(limits.lease_s)
        self._scheduler = DecodeScheduler(
            self.ledger, core.config.decode.max_batch_size, core.config.chunk_tokens, limits.turn_s, time.monotonic
        )
        self._outbox = Outbox(self._send)
        self._speculator = self._new_speculator()
        self._loop = StepLoop(core.steps, self.ledger, self._scheduler, self._outbox, changed, self._speculator)
        self._reservations = Reservations(
            core.me,
            self.ledger,
            self._scheduler,
            vocab_size=core.facts.vocab_size,
            block_size=core.block_size,
            turn_s=limits.turn_s,
            send=self._send,
        )
        self._attaches = Attaches(
            core.facts,
            core.block_size,
            core.grammars,
            self.ledger,
            self._scheduler,
            self._send,
            spawn,
            changed,
            None if core.tiers is None else core.tiers.reader,
        )
        core.books.add(self.ledger)
        self._migrations = Migrations(
            core.peers, self.ledger, self._scheduler, self._loop, self._send, spawn, changed, limits.lease_s
        )
        core.add(self)

    def _new_speculator(self) -> Speculator | None:
        """What guesses tokens; None where the configuration does not want it."""
        config, pool = self.core.config, self.core.rank.runner.pool
        if config.speculative_config is None:
            return None
        # Where bits depend on how rows lie, and on GPUs, whose decode steps are graphs, each draft is a row of its own.
        exact = pool.data.device.type == "cpu" and not self.me.arithmetic.endswith(VARIES)
        speculative, max_rows, slots = config.speculative_config, config.decode.max_batch_size, self._scheduler.room.draft_slots
        if speculative.method == "ngram":
            from decode_workers.speculation.ngram_speculator import NgramSpeculator

            return NgramSpeculator(speculative, max_rows, slots, joined=exact)
        from decode_workers.speculation.model_speculator import ModelSpeculator

        draft, engine, most = self.core.rank.draft, self.core.engine, speculative.num_speculative_tokens
        assert draft is not None, "a draft model was loaded"
        assert isinstance(engine, EngineThread), "and computes in a thread"
        return ModelSpeculator(most, max_rows, slots, draft, engine.run, config.chunk_tokens, _tell, joined=exact)

    def handlers(self) -> dict[type[Any], Handler]:
        """Who answers which message of the role's own."""
        return {
            Reserve: self._reserve,
            Attach: self._attaches.ask,
            Release: self._release,
            Migrate: self._migrations.begin,
            Copy: self._migrations.begin,
            Ping: self._ping,
        }

    def loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the loops that run as long as the worker: the one that computes steps."""
        return [self._loop.run()]

    def peer_lost(self, peer: bytes) -> None:
        """Give up the tickets of a router that is gone, and those that a sender who is gone was filling."""
        self.ledger.peer_lost(peer)

    def beat(self) -> None:
        """Give up the tickets that nobody has renewed, unless this process was held: what renews them may lie unread then."""
        self._listening.look()
        if self._listening.listened_s >= self.core.config.limits.lease_s:
            self.ledger.expire()

    async def close(self) -> None:
        """Nothing is under way that the core does not end."""

    @property
    def token_s(self) -> float:
        """Seconds that computing a token of a prompt took lately; 0 if that is not known."""
        return self._loop.token_s

    @property
    def held_blocks(self) -> set[int]:
        """KV blocks that tickets hold."""
        return self.ledger.held_blocks

    def growth(self, shared: Sequence[bytes] = ()) -> int | None:
        """Blocks that tickets will soon want (`Ledger.growth`); None while a stream waits for blocks of its own."""
        return None if self._scheduler.num_preempted else self.ledger.growth

    @property
    def idle(self) -> bool:
        """No ticket is here any more."""
        return not len(self.ledger)

    def drain(self) -> None:
        """Refuse reservations from now on. Streams that are here go on."""
        self._reservations.draining = True

    def leave(self) -> None:
        """Nothing goes back: tickets go on, and routers move their streams while they run."""

    def changed(self) -> None:
        """Look again whether something can be computed."""
        self._loop.wake()

    def role_load(self) -> RoleLoad:
        """The role's part of the worker's load at this moment."""
        running = len(self._scheduler) - self._scheduler.num_preempted
        waiting = sum(not entry.state.final for entry in self.ledger) - running
        return RoleLoad(
            running=running,
            waiting=max(0, waiting),
            queued_tokens=self._scheduler.queued_tokens,
            tickets=len(self.ledger),
            prefix_cache_queries=self._scheduler.attached.cache_queries,
            prefix_cache_hits=self._scheduler.attached.cache_hits,
            brought=self._attaches.brought,
            decode=DecodeLoad(
                reservable_blocks=self._scheduler.room.reservable_blocks,
                generated_tokens=self._loop.tokens,
                prefilled_tokens=self._scheduler.prefilled_tokens,
                num_preemptions=self._scheduler.preemptions,
                recomputed_tokens=self._scheduler.recomputed_tokens,
                step_s=self._loop.pace_s,
                draft_tokens=0 if self._speculator is None else self._speculator.draft_tokens,
                accepted_tokens=0 if self._speculator is None else self._speculator.accepted_tokens,
            ),
        )

    def role_books(self, asker: bytes) -> RoleBooks:
        """The role's part of the worker's books at this moment."""
        of_drafts = () if self._speculator is None else tuple(self._speculator.problems(self._scheduler.streams))
        return decode_books(
            asker,
            self.ledger,
            self._scheduler,
            self._attaches.waiting(),
            self._migrations.rows(),
            self.core.endpoint.is_connected,
            of_drafts,
        )

    # -- tickets -----------------------------------------------------------------------------------------------------

    def _reserve(self, router: bytes, message: Reserve) -> None:
        if self._reservations.ask(router, message):
            self.core.changed()
        else:
            self._loop.wake()  # it may have to make room

    def _committed(self, entry: TicketEntry) -> None:
        """The KV of a prompt is here."""
        self._attaches.start_if_ready(entry)

    def _failed(self, entry: TicketEntry) -> None:
        """The ledger gave a ticket up; tell whoever waits for it."""
        error = KvTransferError(f"the ticket is {entry.state.value}")
        log.info("a ticket is %s", entry.state.value, extra=fields(trace=entry.trace_id, ticket=entry.ticket_id))
        self._attaches.failed(entry, error)
        if entry.ticket_id in self._scheduler:
            self._scheduler.remove(entry.ticket_id)
            failed = Failed.from_error(0, error)
            self._outbox.put(entry.owner, StreamOutput(entry.ticket_id, (), (), None, failed))

    def _release(self, router: bytes, message: Release) -> None:
        entry = self.ledger.find(message.ticket_id)
        if entry is not None and entry.owner == router:
            self._scheduler.remove(message.ticket_id)
            self._attaches.forget(message.ticket_id)
            self.ledger.release(message.ticket_id)

    def _ping(self, peer: bytes, message: Ping) -> None:
        self.ledger.renew(peer, self._attaches.waiting())


def _tell(message: str, error: Exception | None) -> None:
    log.log(logging.INFO if error is None else logging.ERROR, message, exc_info=error)

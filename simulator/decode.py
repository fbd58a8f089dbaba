"""A decode worker in virtual time: tickets, commits and steps around the real ledger and scheduler.

    reserve ──► committed (KV handed over) and attached (first token), in any order ──► steps ──► finished
       └──► attach_here: chunks of the prompt, computed in the same steps ──► first token ──► steps ──┘

`simulator.step_loop` has the steps. The worker lends its cached blocks, and reads the tier of its node for prompts that it
computes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler
from decode_workers.stream import LocalPrefill, Stream
from decode_workers.ticket_entry import TicketEntry
from engine.memory.prefix_cache import PrefixCache
from protocol.messages.load import MEMORY, Brought, DecodeLoad, LoadReport
from protocol.share import NOBODYS
from simulator.fetching import Lender, Link
from simulator.request import Request
from simulator.shared import MemoryTier, Site
from simulator.step_loop import StepLoop, Ticket
from simulator.telling import EPOCH, Reporter


@dataclass(frozen=True)
class Granted:
    """A reservation: the ticket, and how many of its prompt's first tokens are cached at this worker."""

    ticket_id: int
    held_tokens: int


class DecodeWorker:
    """One decode worker: the real ledger and scheduler, with a clock in the place of the engine."""

    def __init__(self, worker_id: str, site: Site, tier: MemoryTier | None, *, one_by_one: bool = False) -> None:
        """`tier` is that of its node. `one_by_one`: each step is a run of its own, which is slow; tests compare runs with
        it."""
        config, clock = site.config, site.clock
        self.worker_id = worker_id
        self._clock = clock
        self._block_size = config.block_size
        self._tier = tier
        self._reading = None if tier is None else Link(clock, tier.token_s)
        self._one_cache = site.one_cache
        self._news = site.news(worker_id)
        on_change = None if self._news is None else self._news.note
        if self._one_cache is not None:
            on_change = self._one_cache.gained
        self._cache = PrefixCache(config.decode.kv_cache_tokens // config.block_size, on_change=on_change)
        self._ledger = Ledger(
            self._cache,
            config.block_size,
            config.limits.lease_s,
            lambda: clock.now,
            on_committed=self._join,
            on_failed=_nothing_fails,
            on_settled=self._changed,
            on_released=self._released,
        )
        self._turn_s = config.limits.turn_s
        self._scheduler = DecodeScheduler(
            self._ledger, config.decode.max_batch_size, config.chunk_tokens, self._turn_s, lambda: clock.now
        )
        self._tickets: dict[int, Ticket] = {}
        self._loop = StepLoop(
            site,
            self._cache,
            self._scheduler,
            self._tickets,
            self._ended,
            self._changed,
            one_by_one=one_by_one,
        )
        self.lender = Lender(site, self._cache, self._loop.sync, self._lent)
        self._reporter = Reporter(clock, self._load, site.report, site.beat, config.limits.heartbeat_s)

    @property
    def busy_s(self) -> float:
        """Seconds in which it computed so far."""
        return self._loop.busy_s

    @property
    def preemptions(self) -> int:
        """Number of streams that had to give their blocks back so far."""
        return self._scheduler.preemptions

    @property
    def evictions(self) -> int:
        """Number of cached blocks that were given to others so far."""
        return self._cache.evictions

    def start(self) -> None:
        """Send the first load report, and tell that nothing is cached."""
        self._reporter.changed()
        if self._news is not None:
            self._news.start()

    def fits(self, num_tokens: int, max_tokens: int) -> bool:
        """Tell whether the pool can hold a prompt and its whole answer."""
        return self._ledger.blocks.fits(num_tokens, max_tokens)

    def reserve(self, request: Request, on_finished: Callable[[], None], *, own_tokens: int = 0) -> Granted | None:
        """Reserve blocks for a request; None if there are too few, or its turn would come too late. The last `own_tokens` are
        not taken from the cache."""
        self._loop.sync()
        room = self._scheduler.room
        if self._scheduler.wait_s(NOBODYS) > self._turn_s:
            return None
        if self._one_cache is not None:
            self._one_cache.copy_to(self._cache, request.keys(self._block_size))
        entry = self._ledger.reserve(
            b"router",
            request.token_ids,
            request.output_len,
            "",
            own_tokens=own_tokens,
            spare=room.spare_beside(NOBODYS, displaces=True),
        )
        if entry is None:
            num_tokens, keys = len(request.token_ids), request.keys(self._block_size)
            cost = partial(self._ledger.blocks.reserve_cost, keys, num_tokens, request.output_len, own_tokens)
            room.want(NOBODYS, self._ledger.blocks.most_reserved(num_tokens, request.output_len), cost)
            self._loop.look_again()
            return None
        room.granted(NOBODYS)
        self._tickets[entry.ticket_id] = Ticket(request, on_finished)
        self._loop.shorten()
        self._changed()
        return Granted(entry.ticket_id, entry.held_tokens)

    def commit(self, ticket_id: int) -> None:
        """Note that all of the prompt's KV is here."""
        self._loop.sync()
        entry = self._entry(ticket_id)
        missing = len(entry.token_ids) - entry.held_tokens
        if missing:
            self._ledger.begin_push(b"prefill", ticket_id, entry.transfer_id, entry.held_tokens, missing)
            self._ledger.end_push(ticket_id, missing, ok=True)
        committed = self._ledger.commit(ticket_id, entry.transfer_id, len(entry.token_ids))
        assert committed, "a transfer of all tokens commits"

    def attach(self, ticket_id: int, on_attached: Callable[[], None] | None = None) -> None:
        """Let a stream go on, for the router has its first token. `on_attached` is called once the KV is here as well."""
        ticket = self._tickets[ticket_id]
        ticket.attached, ticket.on_attached = True, on_attached
        self._join(self._entry(ticket_id))

    def attach_here(self, ticket_id: int, on_first: Callable[[], None]) -> None:
        """Compute the prompt here as well, once the node's memory was read. `on_first` is called when the first token was
        sampled."""
        self._tickets[ticket_id].on_first = on_first
        entry = self._entry(ticket_id)
        keys = entry.keys[: (len(entry.token_ids) - 1) // self._block_size]
        held = entry.held_tokens // self._block_size
        stored = 0 if self._tier is None else self._tier.match(keys[held:])
        if self._tier is None or self._reading is None or not stored:
            self._start_here(ticket_id)
            return
        self._tier.put(keys[: held + stored])
        filling = self._ledger.begin_fill(ticket_id)
        assert filling, "it is reserved"
        num_tokens = stored * self._block_size
        self._reading.send(num_tokens, self._have_read, ticket_id, num_tokens, self._clock.now)

    def release(self, ticket_id: int) -> None:
        """Give back a ticket that was not attached."""
        self._loop.sync()
        del self._tickets[ticket_id]
        self._ledger.release(ticket_id)
        self._loop.wake()

    @property
    def idle(self) -> bool:
        """No ticket holds any blocks, and nothing is computed."""
        return self._loop.idle and not len(self._ledger) and self._cache.num_free == self._cache.num_blocks

    def check_integrity(self) -> None:
        """Assert that the ledger's books are right."""
        self._ledger.check_integrity()

    def _entry(self, ticket_id: int) -> TicketEntry:
        entry = self._ledger.find(ticket_id)
        assert entry is not None, "only finished tickets are released"
        return entry

    def _join(self, entry: TicketEntry) -> None:
        """What is committed and attached is computed from the next step on."""
        ticket = self._tickets[entry.ticket_id]
        if not ticket.attached or self._scheduler.attached.attach(entry.ticket_id) is None:
            return
        if ticket.on_attached is not None:
            ticket.on_attached()
        request = ticket.request
        self._add(entry, [*request.token_ids, request.index], len(request.token_ids), None)

    def _have_read(self, ticket_id: int, num_tokens: int, began: float) -> None:
        """So many tokens came out of the node's memory."""
        request = self._tickets[ticket_id].request
        self._ledger.end_fill(ticket_id, self._entry(ticket_id).held_tokens + num_tokens)
        request.brought += Brought.of(MEMORY, num_tokens, self._clock.now - began)
        self._start_here(ticket_id)

    def _start_here(self, ticket_id: int) -> None:
        self._loop.sync()
        entry = self._scheduler.attached.attach_here(ticket_id)
        assert entry is not None, "it is reserved, and some of it is not held"
        request = self._tickets[ticket_id].request
        request.cached = entry.held_tokens
        self._add(entry, list(request.token_ids), entry.held_tokens, LocalPrefill(entry.held_tokens, None))

    def _add(self, entry: TicketEntry, token_ids: list[int], computed: int, prefill: LocalPrefill | None) -> None:
        """Let a stream take part from the next step on."""
        request = self._tickets[entry.ticket_id].request
        self._scheduler.add(
            Stream(
                ticket_id=entry.ticket_id,
                owner=b"router",
                block_table=entry.block_table,
                sampling=request.sampling,
                token_ids=token_ids,
                num_generated=len(token_ids) - len(request.token_ids),
                computed=computed,
                prefill=prefill,
            )
        )
        self._changed()
        self._loop.look_again()

    def _ended(self, stream: Stream) -> None:
        """A stream has its last token."""
        ticket_id = stream.ticket_id
        self._scheduler.remove(ticket_id)
        self._scheduler.attached.keep(ticket_id, stream.token_ids, stream.computed)
        self._ledger.release(ticket_id)
        self._tickets.pop(ticket_id).on_finished()

    def _released(self, keys: Sequence[bytes], salt: str) -> None:
        """A ticket no longer has the blocks of these keys, as far as they were filled."""
        if self._tier is not None:
            self._tier.put(keys[: self._cache.match(keys)])
        if self._one_cache is not None:
            self._one_cache.used(keys)

    def _lent(self) -> None:
        """Blocks were pinned for others, or given back."""
        self._changed()
        self._loop.look_again()

    def _changed(self) -> None:
        self._reporter.changed()

    def _load(self) -> LoadReport:
        self._loop.sync()
        running = len(self._scheduler) - self._scheduler.num_preempted
        return LoadReport(
            worker_id=self.worker_id,
            epoch=EPOCH,
            running=running,
            waiting=len(self._ledger) - running,
            queued_tokens=self._scheduler.queued_tokens,
            free_blocks=self._cache.num_free,
            total_blocks=self._cache.num_blocks,
            tickets=len(self._ledger),
            transfers=0,
            steps=self._loop.steps,
            busy_s=self.busy_s,
            step_age_s=0.0,
            cached_blocks=self._cache.num_cached,
            prefix_cache_queries=self._scheduler.attached.cache_queries,
            prefix_cache_hits=self._scheduler.attached.cache_hits,
            lent_tokens=self.lender.lent_tokens,
            decode=DecodeLoad(
                reservable_blocks=self._scheduler.room.reservable_blocks,
                generated_tokens=0,
                prefilled_tokens=self._scheduler.prefilled_tokens,
                num_preemptions=self._scheduler.preemptions,
                step_s=self._loop.pace_s,
                recomputed_tokens=self._scheduler.recomputed_tokens,
            ),
        )


def _nothing_fails(entry: TicketEntry) -> None:
    raise AssertionError(f"ticket {entry.ticket_id} failed, though nobody dies here")

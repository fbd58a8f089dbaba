"""A decode worker in virtual time: tickets, commits and steps around the real ledger and scheduler.

    reserve ──► committed (KV handed over) and attached (first token), in any order ──► steps ──► finished
       └──► attach_here: chunks of the prompt, computed in the same steps ──► first token ──► steps ──┘

Steps that are planned alike are one event, a `StepRun`: the same streams, as long as none of them ends, no other joins and
blocks suffice for all of them. A run is brought up to date (`_sync`) before anybody looks at the books, so they say what they
would after single steps. A step that computes chunks, of a prompt or of what was lost by a preemption, is a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from configs.schema import ClusterConfig
from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler
from decode_workers.stream import LocalPrefill, Stream
from decode_workers.ticket_entry import TicketEntry
from engine.memory.prefix_cache import PrefixCache
from protocol.messages import DecodeLoad, LoadReport, Role
from protocol.share import NOBODYS
from simulator.busyness import Busyness
from simulator.clock import Clock
from simulator.profile import Profile
from simulator.reporter import Reporter
from simulator.request import Request
from simulator.step_run import StepRun, chunks_s

_LEAST_STEP_S = 1e-6
"""A step takes at least this long, whatever the profile says, so that time goes on."""
_LONGEST_RUN_S = 1.0
"""About the longest time until the worker asks again how busy prefill is."""


@dataclass(frozen=True)
class Granted:
    """A reservation: the ticket, and how many of its prompt's first tokens are cached at this worker."""

    ticket_id: int
    held_tokens: int


@dataclass(eq=False)
class _Ticket:
    request: Request
    on_finished: Callable[[], None]
    on_first: Callable[[], None] | None = None
    """Called when the first token of a prompt that is computed here was sampled."""
    on_attached: Callable[[], None] | None = None
    """Called when the ticket joins the batch, if anybody wants to know."""
    attached: bool = False
    """The router has sent the first token."""


class DecodeWorker:
    """One decode worker: the real ledger and scheduler, with a clock in the place of the engine."""

    def __init__(
        self,
        worker_id: str,
        config: ClusterConfig,
        profile: Profile,
        clock: Clock,
        deliver: Callable[[LoadReport], None],
        busyness: Mapping[Role, Busyness],
        *,
        one_by_one: bool = False,
    ) -> None:
        """`deliver` gets the load reports. This worker tells its role's `busyness` when it computes, and asks the other's.
        `one_by_one`: each step is a run of its own, which is slow; tests compare runs with it."""
        self.worker_id = worker_id
        self.busy_s = 0.0
        self._profile = profile
        self._clock = clock
        self._busyness = busyness
        self._block_size = config.block_size
        self._longest_run = 1 if one_by_one else config.decode.kv_cache_tokens
        self._cache = PrefixCache(config.decode.kv_cache_tokens // config.block_size)
        self._ledger = Ledger(
            self._cache,
            config.block_size,
            config.limits.lease_s,
            lambda: clock.now,
            on_committed=self._join,
            on_failed=_nothing_fails,
            on_settled=self._changed,
        )
        self._turn_s = config.limits.turn_s
        self._scheduler = DecodeScheduler(
            self._ledger, config.decode.max_batch_size, config.chunk_tokens, self._turn_s, lambda: clock.now
        )
        self._tickets: dict[int, _Ticket] = {}
        self._run: StepRun | None = None
        self._steps = 0
        self._reporter = Reporter(clock, self._load, deliver)

    @property
    def preemptions(self) -> int:
        """Number of streams that had to give their blocks back so far."""
        return self._scheduler.preemptions

    def start(self) -> None:
        """Send the first load report."""
        self._reporter.changed()

    def fits(self, num_tokens: int, max_tokens: int) -> bool:
        """Tell whether the pool can hold a prompt and its whole answer."""
        return self._ledger.fits(num_tokens, max_tokens)

    def reserve(self, request: Request, on_finished: Callable[[], None], *, own_tokens: int = 0) -> Granted | None:
        """Reserve blocks for a request; None if there are too few, or its turn would come too late. The last `own_tokens` are
        not taken from the cache."""
        self._sync()
        room = self._scheduler.room
        if self._scheduler.wait_s(NOBODYS) > self._turn_s:
            return None
        entry = self._ledger.reserve(
            b"router",
            request.token_ids,
            request.output_len,
            "",
            own_tokens=own_tokens,
            spare=room.spare_beside(NOBODYS, displaces=True),
        )
        if entry is None:
            room.want(NOBODYS, self._ledger.blocks_for_ticket(len(request.token_ids), request.output_len))
            self._look_again()
            return None
        room.granted(NOBODYS)
        self._tickets[entry.ticket_id] = _Ticket(request, on_finished)
        self._shorten()
        self._changed()
        return Granted(entry.ticket_id, entry.held_tokens)

    def commit(self, ticket_id: int) -> None:
        """Note that all of the prompt's KV is here."""
        self._sync()
        entry = self._ledger.find(ticket_id)
        assert entry is not None, "only finished tickets are released"
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
        entry = self._ledger.find(ticket_id)
        assert entry is not None, "only finished tickets are released"
        self._join(entry)

    def attach_here(self, ticket_id: int, on_first: Callable[[], None]) -> None:
        """Compute the prompt here as well. `on_first` is called when the first token was sampled."""
        self._sync()
        ticket, entry = self._tickets[ticket_id], self._ledger.attach_here(ticket_id)
        assert entry is not None, "it is reserved, and some of it is not held"
        ticket.on_first = on_first
        ticket.request.cached = entry.held_tokens
        prefill = LocalPrefill(entry.held_tokens, None)
        self._add(entry, list(ticket.request.token_ids), entry.held_tokens, prefill)

    def release(self, ticket_id: int) -> None:
        """Give back a ticket that was not attached."""
        self._sync()
        del self._tickets[ticket_id]
        self._ledger.release(ticket_id)
        self._wake()

    @property
    def idle(self) -> bool:
        """No ticket holds any blocks, and nothing is computed."""
        return self._run is None and not len(self._ledger) and self._cache.num_free == self._cache.num_blocks

    def check_integrity(self) -> None:
        """Assert that the ledger's books are right."""
        self._ledger.check_integrity()

    def _join(self, entry: TicketEntry) -> None:
        """What is committed and attached is computed from the next step on."""
        ticket = self._tickets[entry.ticket_id]
        if not ticket.attached or self._ledger.attach(entry.ticket_id) is None:
            return
        if ticket.on_attached is not None:
            ticket.on_attached()
        request = ticket.request
        self._add(entry, [*request.token_ids, request.index], len(request.token_ids), None)

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
        self._look_again()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        """Plan anew at the next step."""
        if self._run is not None:
            self._end_after(1)
        self._wake()

    def _wake(self) -> None:
        if self._run is not None:
            return
        scheduler = self._scheduler
        before = scheduler.preemptions, scheduler.num_preempted
        batch = scheduler.plan()
        if before != (scheduler.preemptions, scheduler.num_preempted):
            self._changed()
        if not batch:
            return
        rows = [stream for stream in batch if not stream.recomputing and stream.prefill is None]
        self._note_begun(batch)
        context = sum(len(stream.token_ids) for stream in rows)
        self._busyness[Role.DECODE].begin()
        prefill_busy = self._busyness[Role.PREFILL].share
        first_s, token_s = self._profile.decode_step(len(rows), prefill_busy) if rows else (0.0, 0.0)
        first_s += token_s * context
        if len(rows) < len(batch) or scheduler.room.waits:
            chunks = [scheduler.chunk(stream) for stream in batch]
            first_s += chunks_s(self._profile, batch, chunks, prefill_busy, beside_rows=bool(rows))
            self._run = StepRun(batch, chunks, self._clock.now, 1, max(_LEAST_STEP_S, first_s), 0.0)
        else:
            first_s = max(_LEAST_STEP_S, first_s)
            steps = min(stream.sampling.max_tokens - stream.num_generated for stream in rows)
            self._run = StepRun(batch, None, self._clock.now, min(steps, self._longest_run), first_s, token_s * len(rows))
            self._run.steps = min(self._run.steps, self._steps_with_blocks(self._run), 1 + int(_LONGEST_RUN_S / first_s))
            self._run.steps = min(self._run.steps, scheduler.steps_alike or self._run.steps)
        self._clock.at(self._run.end_of(self._run.steps), self._run_over, self._run, self._run.steps)

    def _note_begun(self, batch: Sequence[Stream]) -> None:
        """Note when the first chunk of each prompt begins."""
        for stream in batch:
            if stream.prefill is not None and stream.prefill.began is None:
                stream.prefill.began = self._clock.now
                self._tickets[stream.ticket_id].request.prefill_began = self._clock.now

    def _run_over(self, run: StepRun, steps: int) -> None:
        if run is not self._run or steps != run.steps:
            return  # it was shortened
        computes_prompts = any(stream.prefill is not None for stream in run.batch)
        self._sync(grow=False)
        self._run = None
        self._busyness[Role.DECODE].end()
        self._scheduler.repeated(run.steps - 1)
        self._scheduler.took(run.end_of(run.steps) - run.end_of(run.steps - 1))
        self.busy_s += run.end_of(run.steps) - run.began
        self._steps += run.steps
        for stream in run.batch:
            if stream.num_generated == stream.sampling.max_tokens:
                ticket_id = stream.ticket_id
                self._scheduler.remove(ticket_id)
                self._ledger.keep(ticket_id, stream.token_ids[: stream.computed])
                self._ledger.release(ticket_id)
                self._tickets.pop(ticket_id).on_finished()
        if computes_prompts:
            self._changed()
        self._wake()

    def _sync(self, *, grow: bool = True) -> None:
        """Bring the books to what they are after the steps that are over; `grow`: and while the next is computed, which has a
        block for the newest token."""
        run = self._run
        if run is None:
            return
        done = run.steps if not grow else min(run.done_at(self._clock.now), run.steps - 1)
        count = done - run.done
        if count == 0:
            return
        run.done = done
        if run.chunks is not None:
            for stream, chunk in zip(run.batch, run.chunks, strict=True):
                self._scheduler.computed(stream, chunk)
                if chunk.sampling is not None:
                    self._sampled(stream)
            return
        for stream in run.batch:
            stream.token_ids += [stream.token_ids[-1]] * count
            stream.num_generated += count
            stream.computed += count
            enough = self._ledger.grow(stream.ticket_id, len(stream.token_ids) if grow else stream.computed)
            assert enough, "a run goes no further than its blocks"

    def _sampled(self, stream: Stream) -> None:
        """A step that computed chunks has made a token of this stream."""
        ticket = self._tickets[stream.ticket_id]
        stream.append(ticket.request.index)
        if stream.prefill is not None:
            stream.prefill = None
            assert ticket.on_first is not None, "its prompt is computed here"
            ticket.on_first()

    def _steps_with_blocks(self, run: StepRun) -> int:
        """How many steps from here on are sure to have blocks: the one that is planned has them, and in `block_size` further
        ones no stream needs more than one."""
        return 1 + self._cache.num_free // len(run.batch) * self._block_size

    def _shorten(self) -> None:
        """Blocks were taken from under a run."""
        if self._run is not None and self._run.chunks is None:
            self._end_after(self._steps_with_blocks(self._run))

    def _end_after(self, steps: int) -> None:
        """Let the run end after so many steps from now on, the one that is being computed included."""
        run = self._run
        assert run is not None, "there is a run"
        self._sync()
        if run.done + steps < run.steps:
            run.steps = run.done + steps
            self._clock.at(run.end_of(run.steps), self._run_over, run, run.steps)

    def _changed(self) -> None:
        self._reporter.changed()

    def _load(self) -> LoadReport:
        self._sync()
        running = len(self._scheduler) - self._scheduler.num_preempted
        return LoadReport(
            worker_id=self.worker_id,
            epoch=1,
            running=running,
            waiting=len(self._ledger) - running,
            queued_tokens=self._scheduler.queued_tokens,
            free_blocks=self._cache.num_free,
            total_blocks=self._cache.num_blocks,
            tickets=len(self._ledger),
            transfers=0,
            steps=self._steps,
            busy_s=self.busy_s,
            step_age_s=0.0,
            cached_blocks=self._cache.num_cached,
            prefix_cache_queries=self._ledger.cache_queries,
            prefix_cache_hits=self._ledger.cache_hits,
            decode=DecodeLoad(
                reservable_blocks=self._scheduler.room.reservable_blocks,
                generated_tokens=0,
                prefilled_tokens=self._scheduler.prefilled_tokens,
                num_preemptions=self._scheduler.preemptions,
                step_s=0.0,
                recomputed_tokens=self._scheduler.recomputed_tokens,
            ),
        )


def _nothing_fails(entry: TicketEntry) -> None:
    raise AssertionError(f"ticket {entry.ticket_id} failed, though nobody dies here")

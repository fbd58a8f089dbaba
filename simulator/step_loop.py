"""The steps of a simulated decode worker, as `decode_workers.step_loop` computes them.

Steps that are planned alike are one event, a `StepRun`: the same streams, as long as none of them ends, no other joins and
blocks suffice for all of them. A run is brought up to date (`StepLoop.sync`) before anybody looks at the books, so they say
what they would after single steps. Only routers hear later of blocks that its tokens evict: with the next look, or at its end.
A step that computes chunks, of a prompt or of what was lost by a preemption, is a run of its own.

Where tokens are guessed, a step here is the share of a real one that makes one token of each stream, and as long. Real workers
guess for each stream as its own guesses went; here all have the profile's chance and equally many guesses. Beside chunks
there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from decode_workers.scheduler import DecodeScheduler
from decode_workers.stream import Stream
from engine.batch import Chunk
from engine.memory.prefix_cache import PrefixCache
from protocol.messages.workers import Role
from simulator.profile import Profile
from simulator.request import Request
from simulator.shared import Site

_LEAST_STEP_S = 1e-6
"""A step takes at least this long, whatever the profile says, so that time goes on."""
_LONGEST_RUN_S = 1.0
"""About the longest time until the worker asks again how busy prefill is."""


@dataclass(eq=False)
class Ticket:
    """A request at this worker, from its reservation until its answer ends."""

    request: Request
    on_finished: Callable[[], None]
    on_first: Callable[[], None] | None = None
    """Called when the first token of a prompt that is computed here was sampled."""
    on_attached: Callable[[], None] | None = None
    """Called when the ticket joins the batch, if anybody wants to know."""
    attached: bool = False
    """The router has sent the first token."""


@dataclass(eq=False)
class StepRun:
    """`steps` steps that are planned alike, from `began` on; step i takes first_s + i * more_s.

    The first `done` of them are in the books of the worker.
    """

    batch: list[Stream]
    chunks: list[Chunk] | None
    """The chunks of a step that computes prompts or recomputes; None if every stream just gets a token."""
    began: float
    steps: int
    first_s: float
    more_s: float
    done: int = 0

    def __post_init__(self) -> None:
        self.computes_prompts = any(stream.prefill is not None for stream in self.batch)

    def end_of(self, steps: int) -> float:
        """The time at which so many steps are over."""
        return self.began + steps * self.first_s + self.more_s * steps * (steps - 1) / 2

    def done_at(self, now: float) -> int:
        """Number of steps that are over at this time."""
        passed = now - self.began
        half = self.more_s / 2
        rest = self.first_s - half
        # Of half * n^2 + rest * n = passed, in the form that is exact for a small half.
        count = int(2 * passed / (rest + sqrt(rest * rest + 4 * half * passed)))
        while count < self.steps and self.end_of(count + 1) <= now:
            count += 1
        while count and self.end_of(count) > now:
            count -= 1
        return min(count, self.steps)


class StepLoop:
    """Computes step after step in virtual time. Whoever changes the worker's books calls `sync` before, and `look_again` or
    `shorten` afterwards.
    """

    def __init__(
        self,
        site: Site,
        cache: PrefixCache,
        scheduler: DecodeScheduler,
        tickets: Mapping[int, Ticket],
        on_ended: Callable[[Stream], None],
        on_change: Callable[[], None],
        *,
        one_by_one: bool,
    ) -> None:
        """`tickets` are those of the worker. `on_ended` is told of streams that have their last token, and `on_change` is
        called when the load has changed. `one_by_one`: each step is a run of its own."""
        self.busy_s = 0.0
        self.steps = 0
        self.pace_s = 0.0
        """How long the latest step took that computed nothing of a prompt; 0 before the first."""
        self._clock = site.clock
        self._profile = site.profile
        self._busyness = site.busyness
        speculative, self._max_rows = site.config.speculative_config, site.config.decode.max_batch_size
        self._most_guesses = speculative.num_speculative_tokens if speculative and self._profile.acceptance else 0
        self._block_size = site.config.block_size
        self._cache = cache
        self._scheduler = scheduler
        self._tickets = tickets
        self._on_ended = on_ended
        self._on_change = on_change
        self._longest_run = 1 if one_by_one else site.config.decode.kv_cache_tokens
        self._run: StepRun | None = None

    @property
    def idle(self) -> bool:
        """Whether no step is computed at the moment."""
        return self._run is None

    def sync(self, *, grow: bool = True) -> None:
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
        if not run.computes_prompts:
            self.pace_s = run.end_of(done) - run.end_of(done - 1)
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
            stream.known = max(stream.known, stream.computed)
            enough = self._scheduler.attached.grow(stream.ticket_id, len(stream.token_ids) if grow else stream.computed)
            assert enough, "a run goes no further than its blocks"

    def look_again(self) -> None:
        """Plan anew at the next step."""
        if self._run is not None:
            self._end_after(1)
        self.wake()

    def shorten(self) -> None:
        """Note that blocks were taken from under a run."""
        if self._run is not None and self._run.chunks is None:
            self._end_after(self._steps_with_blocks(self._run))

    def wake(self) -> None:
        """Compute, if nothing is computed and something can be."""
        if self._run is not None:
            return
        scheduler = self._scheduler
        before = scheduler.preemptions, scheduler.num_preempted
        batch = scheduler.plan()
        if before != (scheduler.preemptions, scheduler.num_preempted):
            self._on_change()
        if not batch:
            return
        self._note_begun(batch)
        self._busyness[Role.DECODE].begin()
        self._run = run = self._planned(batch)
        self._clock.at(run.end_of(run.steps), self._run_over, run, run.steps)

    def _planned(self, batch: list[Stream]) -> StepRun:
        """As many steps of this batch as are sure to be planned alike."""
        scheduler, now = self._scheduler, self._clock.now
        rows = [stream for stream in batch if not stream.recomputing and stream.prefill is None]
        context = sum(len(stream.token_ids) for stream in rows)
        prefill_busy = self._busyness[Role.PREFILL].share
        alone = len(rows) == len(batch) and not scheduler.room.waits
        most_guesses = min(self._most_guesses, self._max_rows // len(rows) - 1) if alone else 0
        first_s, token_s = self._profile.decode_step(len(rows), prefill_busy, most_guesses, context) if rows else (0.0, 0.0)
        first_s += token_s * context
        if not alone:
            chunks = [scheduler.chunk(stream) for stream in batch]
            first_s += _chunks_s(self._profile, batch, chunks, prefill_busy, beside_rows=bool(rows))
            return StepRun(batch, chunks, now, 1, max(_LEAST_STEP_S, first_s), 0.0)
        first_s = max(_LEAST_STEP_S, first_s)
        steps = min(stream.sampling.max_tokens - stream.num_generated for stream in rows)
        run = StepRun(batch, None, now, min(steps, self._longest_run), first_s, token_s * len(rows))
        run.steps = min(run.steps, self._steps_with_blocks(run), 1 + int(_LONGEST_RUN_S / first_s))
        run.steps = min(run.steps, scheduler.steps_alike or run.steps)
        return run

    def _note_begun(self, batch: Sequence[Stream]) -> None:
        """Note when the first chunk of each prompt begins."""
        for stream in batch:
            if stream.prefill is not None and stream.prefill.began is None:
                stream.prefill.began = self._clock.now
                self._tickets[stream.ticket_id].request.prefill_began = self._clock.now

    def _run_over(self, run: StepRun, steps: int) -> None:
        if run is not self._run or steps != run.steps:
            return  # it was shortened
        self.sync(grow=False)
        self._run = None
        self._busyness[Role.DECODE].end()
        self._scheduler.repeated(run.steps - 1)
        self._scheduler.took(run.end_of(run.steps) - run.end_of(run.steps - 1))
        self.busy_s += run.end_of(run.steps) - run.began
        self.steps += run.steps
        for stream in run.batch:
            if stream.num_generated == stream.sampling.max_tokens:
                self._on_ended(stream)
        if run.computes_prompts:
            self._on_change()
        self.wake()

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

    def _end_after(self, steps: int) -> None:
        """Let the run end after so many steps from now on, the one that is being computed included."""
        run = self._run
        assert run is not None, "there is a run"
        self.sync()
        if run.done + steps < run.steps:
            run.steps = run.done + steps
            self._clock.at(run.end_of(run.steps), self._run_over, run, run.steps)


def _chunks_s(
    profile: Profile, batch: Sequence[Stream], chunks: Sequence[Chunk], prefill_busy: float, *, beside_rows: bool
) -> float:
    """Seconds that the chunks of a step add to what its rows take; the time between two steps is counted once."""
    pairs = list(zip(batch, chunks, strict=True))
    prompts = [_extent(chunk) for stream, chunk in pairs if stream.prefill is not None]
    again = [_extent(chunk) for stream, chunk in pairs if stream.prefill is None and chunk.sampling is None]
    if prompts:
        between_steps_s = profile.overheads.step_s if beside_rows else 0.0
        return profile.prefill_step_s([*prompts, *again], prefill_busy) - between_steps_s
    return profile.prefill_step_s(again) if again else 0.0


def _extent(chunk: Chunk) -> tuple[int, int]:
    """First token and number of tokens of a chunk."""
    return chunk.start, len(chunk.token_ids)

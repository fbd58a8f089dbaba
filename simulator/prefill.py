"""A prefill worker in virtual time: the loop of `prefill_workers.worker` around the real scheduler.

prompt ──► what is cached elsewhere is brought ──► QUEUED ──► COMPUTING, a step after the other ──► first token ──► handoff
                                                                                                   blocks free ◄──┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.memory.prefix_cache import PrefixCache
from prefill_workers.scheduler import PlannedChunk, PrefillScheduler, Prompt
from protocol.messages.load import LoadReport, PrefillLoad
from protocol.messages.workers import Role
from simulator.fetching import Fetching, Lender, Wanted
from simulator.request import Request
from simulator.shared import MemoryTier, Site
from simulator.telling import EPOCH, Reporter


@dataclass(frozen=True)
class Job:
    """A prompt, and the functions to call as it goes on."""

    request: Request
    on_first: Callable[[], None]
    """Called when the first token is sampled."""
    on_handed_over: Callable[[], None]
    """Called when all KV is at the decode worker."""
    wanted: Wanted | None = None
    """What is to be fetched before it is queued."""
    held_tokens: int | None = None
    """Number of leading tokens that the decode worker holds, so that they are not handed over. None: what is handed over after
    the first token is the last chunk alone, whatever was cached."""

    def handed_over(self, chunk: PlannedChunk) -> int:
        """Number of tokens that are handed over after the last chunk."""
        if self.held_tokens is None:
            return chunk.num_tokens
        return max(0, chunk.end - max(chunk.handoff_start, self.held_tokens))


class PrefillWorker:
    """One prefill worker: the real scheduler, with a clock in the place of the engine."""

    def __init__(self, worker_id: str, site: Site, tier: MemoryTier | None) -> None:
        """`tier` is that of its node."""
        config = site.config
        self.worker_id = worker_id
        self.busy_s = 0.0
        self._site = site
        self._clock = site.clock
        self._tier = tier
        self._news = site.news(worker_id)
        self._cache = self._own_cache() if site.one_cache is None else site.one_cache.blocks
        self._scheduler = PrefillScheduler(self._cache, config.block_size, config.prefill)
        self._jobs: dict[Prompt, Job] = {}
        self._computing = False
        self._steps = self._computed_tokens = 0
        self._reporter = Reporter(site.clock, self._load, site.report, None, config.limits.heartbeat_s)
        self.lender = Lender(site, self._cache, _nothing_to_settle, self._lent)
        self._fetching = Fetching(site, self._cache, self.lender, tier)
        if site.one_cache is not None:
            site.one_cache.wakes.append(self._wake)

    def start(self) -> None:
        """Send the first load report, and tell that nothing is cached."""
        self._reporter.changed()
        if self._news is not None:
            self._news.start()

    def fits(self, num_tokens: int) -> bool:
        """Tell whether the pool can hold a prompt of this length."""
        return self._scheduler.fits(num_tokens)

    def prefill(self, job: Job) -> None:
        """Take a prompt that arrives now."""
        request = job.request
        prompt = Prompt(request.token_ids, request.keys(self._site.config.block_size))
        self._jobs[prompt] = job
        self._fetching.bring(prompt, job.wanted, lambda: self._queue(prompt))

    @property
    def tables(self) -> list[Sequence[int]]:
        """The blocks of each prompt."""
        return [prompt.block_table.owned for prompt in self._jobs]

    @property
    def idle(self) -> bool:
        """No prompt holds any blocks, and nothing is computed."""
        return not self._computing and not self._jobs and self._cache.num_free == self._cache.num_blocks

    def check_integrity(self) -> None:
        """Assert that every block is free, cached or held by a prompt of this worker, or by others that have the same cache."""
        self._cache.check_integrity(self.tables)

    def _own_cache(self) -> PrefixCache:
        config = self._site.config
        num_blocks = config.prefill.kv_cache_tokens // config.block_size
        return PrefixCache(num_blocks, on_change=None if self._news is None else self._news.note)

    def _queue(self, prompt: Prompt) -> None:
        """All that can be had of the prompt is in the pool."""
        self._scheduler.add(prompt)
        self._reporter.changed()
        self._wake()

    def _wake(self) -> None:
        if self._computing:
            return
        plan = self._scheduler.plan()
        if not plan:
            return
        self._computing = True
        self._site.busyness[Role.PREFILL].begin()
        for chunk in plan:
            if chunk.start == chunk.prompt.cached:
                request = self._jobs[chunk.prompt].request
                request.prefill_began, request.cached = self._clock.now, chunk.prompt.cached
                request.brought = chunk.prompt.brought
        decode_busy = self._site.busyness[Role.DECODE].share
        step_s = self._site.profile.prefill_step_s([(chunk.start, chunk.num_tokens) for chunk in plan], decode_busy)
        self.busy_s += step_s
        self._steps += 1
        self._reporter.changed()
        self._clock.after(step_s, self._step_done, plan)

    def _step_done(self, plan: list[PlannedChunk]) -> None:
        self._computing = False
        self._site.busyness[Role.PREFILL].end()
        self._scheduler.step_done(plan)
        self._computed_tokens += sum(chunk.num_tokens for chunk in plan)
        for chunk in plan:
            if chunk.last:
                job = self._jobs[chunk.prompt]
                job.on_first()
                if job.request.output_len > 1:
                    handoff_s = self._site.profile.handoff_s(job.handed_over(chunk))
                    self._clock.after(handoff_s, self._handed_over, chunk.prompt)
                else:
                    self._forget(chunk.prompt)
        self._wake()

    def _handed_over(self, prompt: Prompt) -> None:
        self._jobs[prompt].on_handed_over()
        self._forget(prompt)
        self._wake()

    def _forget(self, prompt: Prompt) -> None:
        del self._jobs[prompt]
        self._scheduler.release(prompt)
        if self._tier is not None:
            self._tier.put(prompt.keys[: self._cache.match(prompt.keys)])
        if self._site.one_cache is not None:
            self._site.one_cache.released()
        self._reporter.changed()

    def _lent(self) -> None:
        """Blocks were pinned for others, or given back."""
        self._reporter.changed()
        self._wake()

    def _load(self) -> LoadReport:
        return LoadReport(
            worker_id=self.worker_id,
            epoch=EPOCH,
            running=int(self._computing),
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.queued_tokens,
            free_blocks=self._cache.num_free,
            total_blocks=self._cache.num_blocks,
            tickets=len(self._jobs),
            transfers=0,
            steps=self._steps,
            busy_s=self.busy_s,
            step_age_s=0.0,
            cached_blocks=self._cache.num_cached,
            prefix_cache_queries=self._scheduler.cache_queries,
            prefix_cache_hits=self._scheduler.cache_hits,
            lent_tokens=self.lender.lent_tokens,
            prefill=PrefillLoad(computed_tokens=self._computed_tokens),
        )


def _nothing_to_settle() -> None:
    """The books of a prefill worker are right at every moment."""

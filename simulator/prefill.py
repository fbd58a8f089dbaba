"""A prefill worker in virtual time: the loop of `prefill_workers.worker` around the real scheduler.

prompt ──► QUEUED ──► COMPUTING, a step after the other ──► first token ──► handoff ──► blocks free
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from configs.schema import ClusterConfig
from engine.memory.prefix_cache import PrefixCache
from prefill_workers.scheduler import PlannedChunk, PrefillScheduler, Prompt
from protocol.messages import LoadReport, PrefillLoad, Role
from simulator.busyness import Busyness
from simulator.clock import Clock
from simulator.profile import Profile
from simulator.reporter import Reporter
from simulator.request import Request


@dataclass(frozen=True)
class Job:
    """A prompt, and the functions to call as it goes on."""

    request: Request
    on_first: Callable[[], None]
    """Called when the first token is sampled."""
    on_handed_over: Callable[[], None]
    """Called when all KV is at the decode worker."""


class PrefillWorker:
    """One prefill worker: the real scheduler, with a clock in the place of the engine."""

    def __init__(
        self,
        worker_id: str,
        config: ClusterConfig,
        profile: Profile,
        clock: Clock,
        deliver: Callable[[LoadReport], None],
        busyness: Mapping[Role, Busyness],
    ) -> None:
        """`deliver` gets the load reports. This worker tells its role's `busyness` when it computes, and asks the other's."""
        self.worker_id = worker_id
        self.busy_s = 0.0
        self._profile = profile
        self._clock = clock
        self._busyness = busyness
        self._cache = PrefixCache(config.prefill.kv_cache_tokens // config.block_size)
        self._scheduler = PrefillScheduler(self._cache, config.block_size, config.prefill)
        self._jobs: dict[Prompt, Job] = {}
        self._computing = False
        self._steps = 0
        self._reporter = Reporter(clock, self._load, deliver)

    def start(self) -> None:
        """Send the first load report."""
        self._reporter.changed()

    def fits(self, num_tokens: int) -> bool:
        """Tell whether the pool can hold a prompt of this length."""
        return self._scheduler.fits(num_tokens)

    def prefill(self, job: Job) -> None:
        """Take a prompt that arrives now."""
        prompt = self._scheduler.new_prompt(job.request.token_ids, "")
        self._jobs[prompt] = job
        self._scheduler.add(prompt)
        self._reporter.changed()
        self._wake()

    @property
    def idle(self) -> bool:
        """No prompt holds any blocks, and nothing is computed."""
        return not self._computing and not self._jobs and self._cache.num_free == self._cache.num_blocks

    def check_integrity(self) -> None:
        """Assert that every block is free, cached or held by a prompt."""
        self._cache.check_integrity(prompt.block_table for prompt in self._jobs)

    def _wake(self) -> None:
        if self._computing:
            return
        plan = self._scheduler.plan()
        if not plan:
            return
        self._computing = True
        self._busyness[Role.PREFILL].begin()
        for chunk in plan:
            if chunk.start == chunk.prompt.cached:
                request = self._jobs[chunk.prompt].request
                request.prefill_began, request.cached = self._clock.now, chunk.prompt.cached
        decode_busy = self._busyness[Role.DECODE].share
        step_s = self._profile.prefill_step_s([(chunk.start, chunk.num_tokens) for chunk in plan], decode_busy)
        self.busy_s += step_s
        self._steps += 1
        self._reporter.changed()
        self._clock.after(step_s, self._step_done, plan)

    def _step_done(self, plan: list[PlannedChunk]) -> None:
        self._computing = False
        self._busyness[Role.PREFILL].end()
        self._scheduler.step_done(plan)
        for chunk in plan:
            if chunk.last:
                job = self._jobs[chunk.prompt]
                job.on_first()
                if job.request.output_len > 1:
                    self._clock.after(self._profile.handoff_s(chunk.num_tokens), self._handed_over, chunk.prompt)
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
        self._reporter.changed()

    def _load(self) -> LoadReport:
        return LoadReport(
            worker_id=self.worker_id,
            epoch=1,
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
            prefill=PrefillLoad(computed_tokens=0),
        )

"""What a router knows of a worker's load. Pure; `router.rules.ranking` sorts workers by it, `router.rules.pair` chooses.

Two records say it together: the worker's latest load report, and what this router did since (`Outstanding`). A report says
nothing of requests that are still on their way to the worker, so without the second a burst between two reports would all go
to the same worker.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from configs.arithmetic import ceil_div, goes_between
from configs.model_files.kv_window import KvWindow, decode_at_once
from configs.schema import ClusterConfig
from protocol.messages.load import LoadReport
from router.rules.fair_queue import SchedulingClass


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Smallest number of KV blocks that holds this many tokens."""
    return ceil_div(num_tokens, block_size)


def blocks_at_once(config: ClusterConfig, window: KvWindow, num_tokens: int) -> int:
    """Most KV blocks that a sequence of this many tokens has at a decode worker at a time."""
    return blocks_for(decode_at_once(config, window, num_tokens), config.block_size)


def prefill_window(config: ClusterConfig) -> int:
    """Prompt tokens that one router keeps at a prefill worker: the step that is being computed, and the next one."""
    return 2 * config.prefill.batch_tokens


def _tell_nobody() -> None:
    return None


@dataclass
class Outstanding:
    """Requests that one router has given to one worker and that are not done.

    Sizes are in prompt tokens where prompts are counted, and in KV blocks where claims at a decode worker are.
    """

    in_flight: int = 0
    """Number of requests given and not done."""
    in_flight_size: int = 0
    """Size of these requests together."""
    unreported_size: int = 0
    """Size of all requests given since the latest load report."""
    given: int = 0
    """Number of requests given since the link to the worker was made."""
    refused_size: int | None = None
    """Smallest size that the worker has refused since its latest load report; None if it refused nothing."""
    turned_away: set[SchedulingClass] = field(default_factory=set)
    """Classes for which the worker has had no room since its latest load report, though it may have some for others."""
    tenants: Counter[str] = field(default_factory=Counter)
    """Number of prompts in flight by tenant."""
    prompt_sizes: list[int] = field(default_factory=list)
    """Sizes of the prompts in flight, rising."""
    overtaker: str | None = None
    """Tenant whose prompt in flight was sent to go before the others; None if no prompt was."""
    on_change: Callable[[], None] = field(default=_tell_nobody, repr=False, compare=False)
    """Function that is called after every change of these counts."""

    def give_prompt(self, num_tokens: int, tenant: str, *, ahead: bool) -> None:
        """Note that a prompt was sent to the worker; with `ahead` it goes before those in flight."""
        self.tenants[tenant] += 1
        insort(self.prompt_sizes, num_tokens)
        if ahead:
            self.overtaker = tenant
        self.give(num_tokens)

    def prompt_done(self, num_tokens: int, tenant: str) -> None:
        """Note that a prompt was computed, or was cancelled."""
        self.tenants[tenant] -= 1
        self.prompt_sizes.remove(num_tokens)
        if not self.tenants[tenant]:
            del self.tenants[tenant]
            if self.overtaker == tenant:
                self.overtaker = None
        # What was given since the latest report, and is not in flight any more, is not queued either.
        self.unreported_size = min(self.unreported_size, self.in_flight_size - num_tokens)
        self.done(num_tokens)

    def takes_prompt(self, num_tokens: int, window_tokens: int, step_tokens: int, saved: int = 0) -> bool:
        """Tell whether a prompt of this length, of which `saved` tokens need not be computed, may go behind those in flight.

        A router can't reorder what is queued at a worker, so it keeps no more than a window of tokens there, and as many more
        as the prompt saves. An idle worker takes one prompt of any length. One that computes a prompt
        so long that it lets this one go between its steps takes it as if those that let it pass were not there.
        """
        ahead = self.in_flight_size - self.let_between(num_tokens - saved, step_tokens)
        return not ahead or ahead + num_tokens <= window_tokens + 2 * saved

    def let_between(self, num_tokens: int, step_tokens: int) -> int:
        """Tokens of the prompts in flight that let one of `num_tokens` go before them, be they begun: long ones.

        Beside a long one, a prompt of a single step also goes before all that need several.
        """
        if not goes_between(num_tokens, self.longest_prompt, step_tokens):
            return 0

        def lets(size: int) -> bool:
            return size > step_tokens if num_tokens <= step_tokens else goes_between(num_tokens, size, step_tokens)

        return sum(takewhile(lets, reversed(self.prompt_sizes)))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt in flight; 0 without one."""
        return self.prompt_sizes[-1] if self.prompt_sizes else 0

    def may_be_overtaken(self, tenant: str, in_line: Callable[[str], int]) -> bool:
        """Tell whether the only request that `tenant` has in line may go before the prompts in flight.

        It may if there are some, none of these is its own and each of their tenants has more requests in line (`in_line`
        counts them). One prompt overtakes at a time.
        """
        if self.overtaker is not None or tenant in self.tenants:
            return False
        return bool(self.tenants) and all(in_line(other) for other in self.tenants)

    def give(self, size: int) -> None:
        """Note that a request of this size was sent to the worker."""
        self.in_flight += 1
        self.in_flight_size += size
        self.unreported_size += size
        self.given += 1
        self.on_change()

    def done(self, size: int) -> None:
        """Note that a request has left the worker. The room that it frees is seen with the next load report."""
        self.in_flight -= 1
        self.in_flight_size -= size
        assert self.in_flight >= 0
        assert self.in_flight_size >= 0
        self.on_change()

    def refuse(self, size: int) -> None:
        """Note that the worker has no room for a request of this size."""
        self.refused_size = size if self.refused_size is None else min(self.refused_size, size)
        self.on_change()

    def turn_away(self, scheduling_class: SchedulingClass) -> None:
        """Note that the worker has no room for requests of this class."""
        self.turned_away.add(scheduling_class)

    def reported(self) -> None:
        """Note that a load report arrived: it counts what was given before, and earlier refusals are out of date."""
        self.unreported_size = 0
        self.refused_size = None
        self.turned_away.clear()
        self.on_change()


@dataclass(frozen=True)
class WorkerLoad:
    """What is known of one worker's load when a worker is chosen."""

    worker_id: str
    report: LoadReport | None
    """The latest load report; None until the first one arrives."""
    outstanding: Outstanding
    """What this router has there: prompts at a prefill worker, in tokens; claims at a decode worker, in KV blocks."""
    prompts: Outstanding
    """Prompts of this router that the worker computes, in tokens. At a prefill worker it is `outstanding` itself."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the worker computes before those of a new request, as far as is known."""
        reported = self.report.queued_tokens if self.report else 0
        return max(reported + self.prompts.unreported_size, self.prompts.in_flight_size)

    def ahead_of(self, num_tokens: int, step_tokens: int) -> int:
        """Prompt tokens that the worker computes before those of a new prompt with `num_tokens` to compute, as far as is known.

        Beside long prompts of this router that let it go between their steps, these are two of those steps, and one of theirs
        for each of the others'. Long prompts of other routers are not known from other queued tokens.
        """
        between = self.prompts.let_between(num_tokens, step_tokens)
        if not between:
            return self.queued_tokens
        return min(self.queued_tokens, 2 * (self.queued_tokens - between + step_tokens))

    @property
    def held_blocks(self) -> int:
        """KV blocks that tickets hold at a decode worker, as far as is known."""
        reported = self.report.total_blocks - self.report.free_blocks if self.report else 0
        return reported + self.outstanding.unreported_size

    @property
    def reservable_blocks(self) -> int | None:
        """KV blocks that a new ticket may probably take at a decode worker; None if nothing is known."""
        free = None if self.report is None else self.report.reservable_blocks - self.outstanding.unreported_size
        refused = self.outstanding.refused_size
        if refused is None:
            return free
        return refused - 1 if free is None else min(free, refused - 1)

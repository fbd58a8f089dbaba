"""What is asked of the cluster lately: counts of all routers, as rates and means.

router ──RouterObservation (since its start)──► differences ──► samples of the last minutes ──► Demand
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from autoscaler.arrivals import Arrivals
from protocol.cluster_view import DemandCounts, RouterObservation, WorkerSeen
from protocol.messages.workers import Role

FRESH_S = 5.0
"""Seconds after which a router that has told nothing has ended."""
_SLOW_S = 60.0
"""Window of the latest shares."""
LENGTHS_S = 900.0
"""Window of lengths, of the share that is computed, and of shares lately."""
_FEW = 20
"""Fewer requests than this give no share."""


@dataclass(frozen=True)
class Lengths:
    """What requests are like. Means over the last minutes, or of the last ones that there were."""

    prompt_tokens: float
    """Mean number of tokens of a prompt."""
    computed_share: float
    """Share of the tokens of prompts whose first token came that were computed, since nobody had them cached."""
    variation: float
    """Square of the standard deviation of prompts' lengths, by the square of their mean."""
    answer_tokens: float
    """Mean number of tokens of an answer."""

    @property
    def chunk(self) -> tuple[int, int]:
        """(start, number of tokens) of what is computed of a mean prompt, in one step."""
        missing = max(1, round(self.prompt_tokens * self.computed_share))
        return max(0, round(self.prompt_tokens) - missing), missing

    @property
    def context(self) -> float:
        """Mean number of tokens that a running stream has."""
        return self.prompt_tokens + self.answer_tokens / 2


@dataclass(frozen=True)
class RoleState:
    """What the workers of one role do now, together."""

    workers: int = 0
    """Number of workers of the role that have reported."""
    running: int = 0
    queued_tokens: int = 0
    kv_usage: float = 0.0
    """Used part of the KV pool of the fullest worker, from 0 to 1."""
    step_s: float = 0.0
    """Mean of the latest decode steps."""
    held_tokens: int = 0


@dataclass(frozen=True)
class InTime:
    """Shares of what was within a limit, from 0 to 1. None where there was little."""

    latest: float | None
    """Share within the limit in the last minute."""
    lately: float | None
    """Share within the limit in the last quarter of an hour."""

    def missed(self, attainment: float) -> bool:
        """Whether both shares are too small. A minute of a few dozen requests alone may have any share by chance."""
        return all(share is not None and share < attainment for share in (self.latest, self.lately))


@dataclass(frozen=True)
class Demand:
    """What is asked of the cluster, and how well it answers."""

    rate: float
    """Requests that arrive per second."""
    lengths: Lengths | None
    """None before the first answer has ended."""
    waiting: int
    """Requests that wait at routers."""
    first_tokens: InTime
    paced: InTime
    """Answers whose mean time per token was within the limit."""
    roles: Mapping[Role, RoleState]
    prefill_s: float | None
    """Seconds of computation for each prompt token that prefill workers have computed lately; None where they computed none."""
    prompt_s: float | None
    """The same or, where prefill workers computed none, that of decode workers, their decode steps counted in."""
    idle_s: float
    """Seconds since anything was asked, waited or ran."""

    def role(self, role: Role) -> RoleState:
        """Return the load of the workers of a role."""
        return self.roles.get(role, RoleState())


@dataclass(frozen=True)
class _Totals:
    """What was counted in a time."""

    counts: DemandCounts
    busy_s: tuple[float, float]
    """Seconds that prefill workers and decode workers computed."""
    computed: tuple[int, int]

    def values(self) -> tuple[float, ...]:
        return (*astuple(self.counts), *self.busy_s, *self.computed)

    @classmethod
    def of(cls, values: Sequence[float]) -> _Totals:
        *counts, busy_prefill, busy_decode, computed_prefill, computed_decode = values
        computed = int(computed_prefill), int(computed_decode)
        return cls(DemandCounts(*map(int, counts)), (busy_prefill, busy_decode), computed)


class _Window:
    """Sums of the last seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._parts: deque[tuple[float, tuple[float, ...]]] = deque()
        self._sums = [0.0] * len(_Totals(DemandCounts(), (0.0, 0.0), (0, 0)).values())

    def add(self, at: float, values: tuple[float, ...]) -> None:
        if not any(values):
            return
        self._parts.append((at, values))
        self._sums = [one + other for one, other in zip(self._sums, values, strict=True)]

    def total(self, now: float) -> _Totals:
        while self._parts and self._parts[0][0] <= now - self._length_s:
            _, values = self._parts.popleft()
            self._sums = [one - other for one, other in zip(self._sums, values, strict=True)]
        if not self._parts:
            self._sums = [0.0] * len(self._sums)
        return _Totals.of(self._sums)


class DemandMeter:
    """Takes what routers tell, and says what is asked. Times are seconds on one clock that every call gets."""

    def __init__(self, now: float) -> None:
        self.num_arrived = 0
        """Requests that have arrived so far."""
        self._asked_at = now
        self._routers: dict[str, tuple[float, RouterObservation]] = {}
        self._lives: dict[tuple[str, int], tuple[float, WorkerSeen]] = {}
        self._slow, self._long = _Window(_SLOW_S), _Window(LENGTHS_S)
        self._arrivals = Arrivals(now)
        self._lengths: Lengths | None = None

    def observe(self, seen: RouterObservation, now: float) -> None:
        """Take what a router tells."""
        self._routers = {name: each for name, each in self._routers.items() if now - each[0] < LENGTHS_S}
        before = self._routers.get(seen.router_id)
        # A router that is heard for the first time may have counted for days.
        since, counts = (now, DemandCounts()) if before is None else (before[0], _minus(seen.counts, before[1].counts))
        self._routers[seen.router_id] = now, seen
        self.num_arrived += counts.arrived
        busy_s, computed = dict.fromkeys(Role, 0.0), dict.fromkeys(Role, 0)
        for worker in seen.workers:
            self._note(worker, busy_s, computed, now)
        prefill, decode = Role.PREFILL, Role.DECODE
        totals = _Totals(counts, (busy_s[prefill], busy_s[decode]), (computed[prefill], computed[decode]))
        for window in (self._slow, self._long):
            window.add(now, totals.values())
        self._arrivals.add(counts.arrived, since, now)
        if counts.arrived or seen.waiting or any(worker.running or worker.waiting for worker in seen.workers):
            self._asked_at = now

    def demand(self, now: float, start_s: float = 0.0) -> Demand:
        """What is asked now. What lasts no longer than the start of a worker is no burst: it would come too late."""
        slow, long = self._slow.total(now), self._long.total(now)
        counts = slow.counts, long.counts
        fresh = [seen for at, seen in self._routers.values() if now - at < FRESH_S]
        spent = [busy_s / computed if computed else None for busy_s, computed in zip(slow.busy_s, slow.computed, strict=True)]
        return Demand(
            rate=self._arrivals.rate(now, start_s),
            lengths=self._measure_lengths(long),
            waiting=sum(seen.waiting for seen in fresh),
            first_tokens=InTime(*(_share(each.first_in_time, each.first_tokens) for each in counts)),
            paced=InTime(*(_share(each.in_pace, each.paced) for each in counts)),
            roles={role: self._role_state(role, now) for role in Role},
            prefill_s=spent[0],
            prompt_s=spent[1] if spent[0] is None else spent[0],
            idle_s=now - self._asked_at,
        )

    def _measure_lengths(self, totals: _Totals) -> Lengths | None:
        sums = totals.counts
        if sums.prompt_tokens and sums.read_tokens and sums.ended:
            mean = sums.prompt_tokens / sums.arrived
            self._lengths = Lengths(
                prompt_tokens=mean,
                computed_share=min(1.0, sum(totals.computed) / sums.read_tokens),
                variation=max(0.0, sums.squared_tokens / sums.arrived / mean**2 - 1),
                answer_tokens=sums.answer_tokens / sums.ended,
            )
        return self._lengths

    def _role_state(self, role: Role, now: float) -> RoleState:
        seen = [worker for at, worker in self._lives.values() if worker.role is role and now - at < FRESH_S]
        if not seen:
            return RoleState()
        steps = [worker.step_s for worker in seen if worker.step_s and worker.running]
        return RoleState(
            workers=len(seen),
            running=sum(worker.running for worker in seen),
            queued_tokens=sum(worker.queued_tokens for worker in seen),
            kv_usage=max(worker.kv_usage for worker in seen),
            step_s=sum(steps) / len(steps) if steps else 0.0,
            held_tokens=sum(worker.held_tokens for worker in seen),
        )

    def _note(self, worker: WorkerSeen, busy_s: dict[Role, float], computed: dict[Role, int], now: float) -> None:
        """Several routers tell of the same life; the one that is ahead counts."""
        life = worker.worker_id, worker.epoch
        before = self._lives.get(life)
        self._lives[life] = now, worker
        if before is None:
            self._lives = {key: each for key, each in self._lives.items() if now - each[0] < LENGTHS_S}
            return
        former = before[1]
        if worker.busy_s < former.busy_s:
            self._lives[life] = now, former
            return
        busy_s[worker.role] += worker.busy_s - former.busy_s
        computed[worker.role] += max(0, worker.computed_tokens - former.computed_tokens)


def _minus(one: DemandCounts, other: DemandCounts) -> DemandCounts:
    """Counts never fall."""
    return DemandCounts(*(max(0, getattr(one, field.name) - getattr(other, field.name)) for field in fields(DemandCounts)))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole >= _FEW else None

"""The autoscaler: what is observed goes in, wanted sizes with a reason come out. Pure; the clock is an argument.

    observe (each router, twice a second) ──► Demand ──► needs ──► sizes ──► decision ──► `scale`
                                               History ──► growth ┘   └ Holds

    RUNNING ──an operator scales, flips or drains──► PAUSED ──resume──► RUNNING

`autoscaler.capacity` says how many workers a demand needs, `autoscaler.policy` when that becomes a size. Two things are learned
beside: how much slower workers are than their step times say, and whether more than what is reckoned is needed to keep the
limits. While it is paused, it wakes roles that sleep and decides nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoscaler.capacity import MOST, Capacity, Pace, Slo, WorkerLimits, learned_times
from autoscaler.demand import FRESH_S, Demand, DemandMeter, Lengths
from autoscaler.forecast import History
from autoscaler.limits import Sizes, budgets_of, ranges_at, within
from autoscaler.policy import Holds, Need, decide, with_spare
from autoscaler.trust import Trust
from configs.autoscale import AutoscaleConfig, SizeRange
from configs.step_times import StepTimes
from protocol.cluster_view import RouterObservation, SizeChanges, SizeDecision
from protocol.messages.workers import Role

KEPT_DECISIONS = 50
FIRST_START_S = 10.0
"""Seconds that a start is taken to last until one was seen."""
_SOONEST_S, _LATEST_S = 1.0, 30.0
"""Bounds of the time in which prompts that wait should be computed: half of what the first token may take. Where a start takes
longer, they are given that long, for nobody can come sooner."""
_MOST_KEPT = 1.25
"""So many times the present rate is the most for which workers are kept, if the forecast expects it within a bin. A lull of
some minutes takes none away that are needed again; a day that is quieter than others costs no more than that."""
_LATE_START = 3.0
"""So many times the usual start is waited for before fewer workers may be wanted than there are to come."""


@dataclass(frozen=True)
class ScalerRecord:
    """All that must outlive a controller: another autoscaler can go on with it."""

    paused: str | None = None
    """Why it is paused; None if it is not."""
    decisions: tuple[SizeDecision, ...] = ()
    bins: tuple[float, ...] = ()
    latest_bin: int = 0
    changes: tuple[SizeChanges, ...] = ()


@dataclass(frozen=True)
class Present:
    """Sizes of the pools at the moment of a decision."""

    wanted: Sizes
    ready: Sizes
    start_s: float | None
    """Seconds that the latest starts took; None before the first."""
    both: int = 0
    """Number of decode workers that compute prompts for others, too, or will soon. While they are enough, prefill sleeps."""

    @property
    def settled(self) -> bool:
        """Whether as many workers are ready as are wanted."""
        return self.wanted == self.ready


class Autoscaler:
    """Decides for one cluster.

    Times are seconds of one clock that all calls share and that is never set. Schedules, seasons and the times of decisions are
    by the wall clock, which may be: `wall_ahead_s` is how far it is ahead.
    """

    def __init__(
        self,
        config: AutoscaleConfig,
        limits: WorkerLimits,
        times: StepTimes | None,
        *,
        prefills: bool,
        needed: tuple[Role, ...],
        flips: bool,
        now: float,
        gpus: Mapping[Role, float] | None = None,
        record: ScalerRecord = ScalerRecord(),
    ) -> None:
        """`times`: what steps take; None where that was not measured. `prefills`: the cluster has prefill workers. `needed`:
        roles without which no request can be answered. `flips`: workers can change their role. `gpus`: what one worker of each
        role reserves.
        """
        self._config = config
        self._budgets = budgets_of(config, gpus or {})
        self._limits = limits
        self._times = times
        self._prefills = prefills
        self._needed = needed
        self._flips = flips
        self._slo = Slo(config.ttft_s, config.tpot_s, config.attainment)
        self._meter = DemandMeter(now)
        self._holds = Holds(config.hold_s)
        self._history = History(config.season_s, record.bins, record.latest_bin)
        self._trust = Trust(config.attainment)
        self.wall_ahead_s = 0.0
        """Seconds to add to the calls' times for seconds since 1970. Whoever knows both clocks sets it before each call."""
        self._began = now
        self._learned = StepTimes(prefill=(), decode=())
        """Step times as they were seen, where none were measured; no points for a role that has done nothing yet."""
        self._most = max((each.most for sizes in config.all_sizes() for each in sizes.values()), default=MOST)
        self._changes = {role: SizeChanges(role) for role in Role} | {each.role: each for each in record.changes}
        self._decisions = deque(record.decisions, KEPT_DECISIONS)
        self._decided_at = min(now, record.decisions[-1].at) if record.decisions else now
        """When the latest decision was done, by the calls' clock."""
        self.paused = record.paused
        """Why it is paused; None if it is not."""

    @property
    def decisions(self) -> tuple[SizeDecision, ...]:
        """The latest ones, the newest last."""
        return tuple(self._decisions)

    @property
    def changes(self) -> tuple[SizeChanges, ...]:
        """How often each role's size was changed, up and down."""
        return tuple(self._changes.values())

    def record(self) -> ScalerRecord:
        """Return what another autoscaler needs to go on from here."""
        history = self._history
        return ScalerRecord(self.paused, self.decisions, tuple(history.bins), history.latest, self.changes)

    def keep(self, decision: SizeDecision, before: Sizes) -> None:
        """Note a decision that is done. `before` are the sizes that were wanted until then."""
        self._decided_at = decision.at - self.wall_ahead_s
        self._decisions.append(decision)
        for role, size in decision.sizes.items():
            counted = self._changes[role]
            if size > before[role]:
                self._changes[role] = replace(counted, up=counted.up + 1)
            elif size < before[role]:
                self._changes[role] = replace(counted, down=counted.down + 1)

    def observe(self, seen: RouterObservation, now: float) -> None:
        """Take what a router tells."""
        before = self._meter.num_arrived
        self._meter.observe(seen, now)
        self._history.add(self._meter.num_arrived - before, self._wall(now))

    def wake(self, present: Present, now: float) -> SizeDecision | None:
        """A decision if a request waits for a role that sleeps, which is there at once, paused or not."""
        ranges = ranges_at(self._config, self._wall(now))
        covered = (Role.PREFILL,) if present.both else ()
        asleep = [role for role in self._needed if present.wanted.get(role) == 0 and role in ranges and role not in covered]
        if not asleep or not self._meter.demand(now).waiting:
            return None
        names = " and ".join(role.value for role in asleep)
        sizes, reason = {**present.wanted, **dict.fromkeys(asleep, 1)}, f"{names} 0 → 1: a request waits"
        if any(budget.exceeded_by(sizes) for budget in self._budgets) and self.paused is None:
            woken = {role: SizeRange(least=max(1, ranges[role].least), most=ranges[role].most) for role in asleep}
            sizes = within(sizes, ranges | woken, self._budgets)
            reason += ", and others go, as all together have a limit"
        return SizeDecision(self._wall(now), sizes, reason)

    def decide(self, present: Present, now: float) -> SizeDecision | None:
        """A decision if other sizes are wanted from now on."""
        ranges = ranges_at(self._config, self._wall(now))
        start_s = present.start_s or FIRST_START_S
        demand = self._meter.demand(now, start_s)
        reported = any(demand.role(role).workers for role in Role)
        if now - self._began < FRESH_S or (any(present.ready.values()) and not reported):
            return None  # demand from before its start is unknown
        needs = self._needs(demand, present, start_s, now)
        needs = {role: need for role, need in needs.items() if role in ranges}
        for role, need in needs.items():
            self._holds.note(role, max(need.workers, need.to_keep), now)
        if self.paused is not None:
            return None
        sizes = decide(
            needs,
            self._holds,
            present.wanted,
            ranges,
            self._budgets,
            now,
            hold_s=min(self._config.hold_s, start_s),
            flips=self._flips,
            settled=self._settled(present, start_s, now),
        )
        if sizes == dict(present.wanted):
            return None
        return SizeDecision(self._wall(now), sizes, _words(present.wanted, sizes, needs))

    def pause(self, reason: str) -> None:
        """Make no decision until `resume`, for the given reason."""
        self.paused = reason

    def resume(self) -> None:
        """Make decisions again after `pause`."""
        self.paused = None

    def _settled(self, present: Present, start_s: float, now: float) -> bool:
        """Whether workers may be taken away: what is wanted is there, or has had its time to come."""
        has_come = present.settled or now - self._decided_at > max(self._config.hold_s, _LATE_START * start_s)
        return has_come and now - self._began >= self._config.hold_s

    def _wall(self, now: float) -> float:
        """What the wall clock says at this time."""
        return now + self.wall_ahead_s

    def _needs(self, demand: Demand, present: Present, start_s: float, now: float) -> dict[Role, Need]:
        """What each role needs."""
        if demand.idle_s >= self._config.idle_s:
            reason = f"nothing was asked for {self._config.idle_s:g} s"
            return dict.fromkeys(self._roles, Need(0, 0, reason))
        as_it_is = {role: Need(present.wanted[role], present.wanted[role], "nothing is known yet") for role in self._roles}
        if demand.lengths is None:
            return as_it_is
        capacity = self._capacity(demand, demand.lengths)
        pace = self._trust.pace(demand, self._times)
        self._trust.note(demand, now)
        wall = self._wall(now)
        ahead_s = start_s + 1.0  # by then, a worker that is wanted now takes requests
        growth = self._history.growth(wall, ahead_s)
        later = max(growth, self._history.growth(wall, ahead_s + self._config.hold_s))
        if demand.rate:
            later = max(later, min(_MOST_KEPT, self._history.expected(wall) / demand.rate))
        needs = {}
        for role in self._roles:
            if not capacity.knows(role):
                needs[role] = as_it_is[role]
                continue
            if not present.wanted[role] and not demand.rate and not demand.waiting:
                needs[role] = Need(0, 0, "nothing is asked")
                continue
            margin = self._trust.margin(role)
            more = self._need(role, growth * margin, demand, capacity, pace, start_s)
            to_keep = self._need(role, later * margin * with_spare(more), demand, capacity, pace, start_s)
            reason = f"{demand.rate:.3g} requests/s of {demand.lengths.prompt_tokens:.0f} + "
            reason += f"{demand.lengths.answer_tokens:.0f} tokens"
            reason += f", {growth:.2g} times as many soon" if growth > 1.05 else ""
            reason += f", with {margin:.2g} times the room, as limits were missed" if margin > 1.05 else ""
            # Steps of prompts take turns with those of its streams, so one that does both must have some time to spare.
            covered = role is Role.PREFILL and not present.wanted[role] and present.both >= max(1, to_keep)
            needs[role] = Need(0, 0, reason) if covered else Need(max(1, more), max(1, to_keep), reason)
        return needs

    def _need(self, role: Role, times: float, demand: Demand, capacity: Capacity, pace: Pace, start_s: float) -> int:
        lengths = demand.lengths
        assert lengths is not None, "checked"
        if role is Role.DECODE:
            return capacity.decode(demand.rate * times, lengths, pace, demand.waiting)
        prompts = demand.waiting + demand.role(Role.PREFILL).queued_tokens / max(1.0, lengths.prompt_tokens)
        within_s = max(start_s, min(_LATEST_S, max(_SOONEST_S, self._slo.ttft_s / 2)))
        late = max(0.0, prompts - demand.rate * within_s)  # those that wait in any case are no backlog
        return capacity.prefill(demand.rate * times + late / within_s, lengths, pace)

    def _capacity(self, demand: Demand, lengths: Lengths) -> Capacity:
        times = self._times
        if times is None:
            decode = demand.role(Role.DECODE)
            streams = decode.running / max(1, decode.workers)
            times = self._learned = learned_times(self._learned, demand.prompt_s, lengths, streams, decode.step_s)
        return Capacity(times, self._slo, self._limits, colocated=not self._prefills, most=self._most)

    @property
    def _roles(self) -> tuple[Role, ...]:
        return (Role.PREFILL, Role.DECODE) if self._prefills else (Role.DECODE,)


def fitted(decision: SizeDecision, sizes: Sizes, before: Sizes) -> SizeDecision:
    """Return the decision as it is done where there is room for no more than these sizes.

    `before` are the sizes that were wanted until then.
    """
    if sizes == decision.sizes:
        return decision
    why = decision.reason.partition(": ")[2]
    return replace(decision, sizes=sizes, reason=f"{_changes(before, sizes)}: {why}")


def _words(before: Sizes, after: Sizes, needs: Mapping[Role, Need]) -> str:
    """Such as `prefill 1 → 2, decode 3 → 2: 12 requests/s of 900 + 100 tokens`."""
    reasons = dict.fromkeys(need.reason for role, need in needs.items() if after[role] != before[role])
    return f"{_changes(before, after)}: {'; '.join(reasons) or 'the limits of the sizes'}"


def _changes(before: Sizes, after: Sizes) -> str:
    return ", ".join(f"{role.value} {before[role]} → {after[role]}" for role in after if after[role] != before[role])

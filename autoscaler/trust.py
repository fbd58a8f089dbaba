"""How far the reckoning can be trusted: how slow workers really are, and whether limits are kept. Pure."""

from __future__ import annotations

from autoscaler.capacity import Pace
from autoscaler.demand import Demand
from configs.step_times import StepTimes
from protocol.messages.workers import Role

_SLOWEST, _FASTEST = 5.0, 0.5
_LEARN = 0.1
"""What one look changes of what is known."""
JUDGE_S = 180.0
"""Limits are judged so often. By then workers that were started for the last judgement have worked off what had waited."""
_STEP, _MOST = 1.1, 1.5
_BACK = 0.97
"""Room goes slowly: where it goes as fast as it came, sizes go up and down with it."""
_FULL_KV = 0.9


class Trust:
    """Learns by every look at the demand."""

    def __init__(self, attainment: float) -> None:
        self._attainment = attainment
        self._pace = Pace()
        self._margins = dict.fromkeys(Role, 1.0)
        self._judged_at: float | None = None

    def pace(self, demand: Demand, times: StepTimes | None) -> Pace:
        """How slow workers are, beside what the step times say. Without those, what was seen is what is reckoned with."""
        if times is None or demand.lengths is None:
            return Pace()
        prefill, decode = self._pace.prefill, self._pace.decode
        lengths, state = demand.lengths, demand.role(Role.DECODE)
        if demand.prefill_s is not None:
            expected = times.prefill_s([lengths.chunk]) / lengths.chunk[1]
            prefill += _LEARN * (demand.prefill_s / expected - prefill)
        if state.step_s and state.running:
            streams = state.running / max(1, state.workers)
            expected = times.decode_s(max(1.0, streams), state.held_tokens / state.running)
            decode += _LEARN * (state.step_s / expected - decode)
        self._pace = Pace(*(min(_SLOWEST, max(_FASTEST, each)) for each in (prefill, decode)))
        return self._pace

    def note(self, demand: Demand, now: float) -> None:
        """Judge, every `JUDGE_S`, whether the limits were kept. If not, the queues tell which role is to blame."""
        if self._judged_at is not None and now - self._judged_at < JUDGE_S:
            return
        self._judged_at = now
        late = dict.fromkeys(Role, False)
        if demand.first_tokens.missed(self._attainment):
            full = demand.role(Role.DECODE).kv_usage > _FULL_KV or not demand.role(Role.PREFILL).workers
            late[Role.DECODE if full else Role.PREFILL] = True
        if demand.paced.missed(self._attainment):
            late[Role.DECODE] = True
        for role, missed in late.items():
            margin = self._margins[role] * (_STEP if missed else _BACK)
            self._margins[role] = min(_MOST, max(1.0, margin))

    def margin(self, role: Role) -> float:
        """So many times the demand is reckoned with for a role."""
        return self._margins[role]

"""How many workers a demand needs, by what steps take (`configs.step_times`). Pure.

A prompt waits for the prompts before it. So how busy prefill workers may be depends on how many there are, and on how far the
limit is from what one prompt takes. The wait is that of a queue with several servers (Erlang C), with Allen and Cunneen's
factor for prompts of different lengths. A decode worker takes as many streams as its KV pool holds and its steps stay within
the limit for. Room is kept for a standard deviation more than the mean number of streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoscaler.demand import Lengths
from configs.profiles import DecodeTime, PrefillTime
from configs.step_times import StepTimes
from protocol.messages.workers import Role

_KV_SHARE = 0.85
"""Share of a KV pool that is planned for; the rest is for streams that grow."""
_TPOT_SHARE = 0.9
"""Share of the TPOT limit that a step may take. A stream also waits for its handover, and for prompts in its steps."""
_PEAK = 1.0
"""Standard deviations above the mean number of streams for which there is room: an answer lasts longer than most peaks."""
_LONGEST_SHARE = 0.95
"""Largest share of its time in which a prefill worker is planned to compute, however patient its callers are."""
_LEAST_STEPS = 1.05
"""So many times the step of a single stream is allowed in any case: no number of workers makes steps shorter."""
MOST = 1024
"""Workers that are looked at, unless somebody says otherwise."""


@dataclass(frozen=True)
class Slo:
    """Latency limits that requests are promised, in seconds."""

    ttft_s: float
    tpot_s: float
    attainment: float
    """Share of the requests that is to have both."""


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of one worker: most streams in a step, and tokens in its KV pool."""

    max_batch_size: int
    decode_tokens: int
    """Tokens that a decode worker's KV pool holds."""


@dataclass(frozen=True)
class Pace:
    """How much slower workers are than the step times say, by what was measured lately; 1 is as fast."""

    prefill: float = 1.0
    decode: float = 1.0


class Capacity:
    """Answers for one kind of worker."""

    def __init__(self, times: StepTimes, slo: Slo, limits: WorkerLimits, *, colocated: bool, most: int = MOST) -> None:
        """`colocated`: decode workers compute the prompts, and there are no others. Of more than `most` workers nobody asks."""
        self._most = most
        self._times = times
        self._slo = slo
        self._limits = limits
        self._colocated = colocated

    def knows(self, role: Role) -> bool:
        """Whether the times of all steps are known that a worker of this role computes."""
        prefills, decodes = role is Role.PREFILL or self._colocated, role is Role.DECODE
        return bool(self._times.prefill or not prefills) and bool(self._times.decode or not decodes)

    def prompt_s(self, lengths: Lengths, pace: Pace) -> float:
        """Seconds that a mean prompt takes, of what nobody has cached."""
        return pace.prefill * self._times.prefill_s([lengths.chunk])

    def prefill(self, rate: float, lengths: Lengths, pace: Pace) -> int:
        """The fewest prefill workers that give first tokens in time, at so many requests per second; 0 for none."""
        if not rate:
            return 0
        prompt_s = self.prompt_s(lengths, pace)
        offered = rate * prompt_s
        # Nobody gets a first token sooner than his own prompt takes.
        patience_s = max(self._slo.ttft_s - prompt_s, 0.2 * prompt_s)
        workers = max(1, math.ceil(offered / _LONGEST_SHARE))
        while workers < self._most and _late_share(workers, offered, prompt_s, lengths.variation, patience_s) > self._late:
            workers += 1
        return min(workers, self._most)

    def decode(self, rate: float, lengths: Lengths, pace: Pace, waiting: int = 0) -> int:
        """The fewest decode workers whose steps are short enough, at so many requests per second, and for those that wait."""
        if not rate and not waiting:
            return 0
        workers = 1
        while workers < self._most and not self._decodes(workers, rate, lengths, pace, waiting):
            workers += 1
        return workers

    @property
    def _late(self) -> float:
        return 1 - self._slo.attainment

    def _decodes(self, workers: int, rate: float, lengths: Lengths, pace: Pace, waiting: int) -> bool:
        """Whether this many workers keep the limit for each token."""
        prompts_share = rate * self.prompt_s(lengths, pace) / workers if self._colocated else 0.0
        if prompts_share >= _LONGEST_SHARE * _TPOT_SHARE:
            return False
        context = lengths.context
        limit_s = max(_TPOT_SHARE * self._slo.tpot_s, _LEAST_STEPS * pace.decode * self._times.decode_s(1, context))
        most = min(self._limits.max_batch_size, _KV_SHARE * self._limits.decode_tokens / max(1.0, context))
        # A stream takes as long as its steps, and these the longer the more streams there are: from few streams upwards,
        # this comes to rest at the number that there will be, or runs away.
        streams = 1.0
        for _ in range(64):
            step_s = pace.decode * self._times.decode_s(max(1.0, streams / workers), context) / (1 - prompts_share)
            under_way = rate * lengths.answer_tokens * step_s + waiting
            peak = under_way + _PEAK * under_way**0.5
            if step_s > limit_s or streams / workers > most:
                return False
            if peak <= streams * 1.01:
                return True
            streams = peak
        return False


def learned_times(before: StepTimes, prefill_s: float | None, lengths: Lengths, streams: float, step_s: float) -> StepTimes:
    """Step times by what was seen lately, where none were measured: lines through one point each.

    `prefill_s` is per prompt token, `step_s` of a step of so many streams. Of a role that did nothing lately, they are those of
    `before`.
    """
    prefill, decode = before.prefill, before.decode
    if prefill_s is not None:
        _, tokens = lengths.chunk
        prefill = (PrefillTime(tokens=tokens, start=0, seconds=max(1e-6, prefill_s * tokens)),)
    if step_s:
        context = max(1, round(lengths.context))
        decode = (DecodeTime(batch=max(1, round(streams)), context=context, seconds=step_s),)
    return StepTimes(prefill=prefill, decode=decode)


def _late_share(servers: int, offered: float, service_s: float, variation: float, patience_s: float) -> float:
    """The share of arrivals that wait longer than this at so many servers."""
    if offered >= servers:
        return 1.0
    decay = 2 / (1 + variation) * (servers - offered) * patience_s / service_s
    return _erlang_c(servers, offered) * math.exp(-decay)


def _erlang_c(servers: int, offered: float) -> float:
    """The share of arrivals that wait at all (Erlang's formula, by the recursion for his B)."""
    blocked = 1.0
    for each in range(1, servers + 1):
        blocked = offered * blocked / (each + offered * blocked)
    share = offered / servers
    return blocked / (1 - share * (1 - blocked))

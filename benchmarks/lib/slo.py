"""Goodput from runs at some rates, and at which rate to look next: the pure part of `benchmarks.goodput`.

Goodput is DistServe's (Zhong et al., OSDI 2024): the highest rate at which 90 % of the requests meet their limits. Rates are on
one grid for all systems, each 3 % above the one before. The edge of what is good is looked for on all of it for the limits
themselves, and on every third rate for tighter and looser ones. A run has a time to the first token and a time per token of
every request, so it says for all limits at once whether its rate was good; the search for one limit profits from the runs for
others.

Runs are noisy, and more load never helps: so what counts is the falling line through the shares of requests that met the limits
that fits them best (isotonic regression, by pooling adjacent violators). One unlucky run among good ones changes little then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.metrics import is_good
from loadtest.records import RequestRecord

ATTAINMENT = 0.9
PAIRS = ((500, 30), (500, 40), (1000, 60))
"""Limits of TTFT and TPOT at scale 1, in ms."""
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)
STEPS_PER_DOUBLING = 24
LOWEST_STEP, HIGHEST_STEP = -48, 144
"""The ends of the grid: a request in four seconds, and 64 in one."""
COARSE = 3
"""Steps between two rates for other limits than those at scale 1."""
_JUMP = STEPS_PER_DOUBLING
"""Steps to go up or down while no good rate, or no bad one, is known."""


@dataclass(frozen=True)
class Slo:
    """Limits of TTFT and TPOT that a request has to meet."""

    ttft_ms: float
    tpot_ms: float
    scale: float

    @property
    def name(self) -> str:
        """The name of the SLO in results."""
        return f"{self.ttft_ms:g}/{self.tpot_ms:g} x {self.scale:g}"

    @property
    def limits_ms(self) -> dict[str, float]:
        """The limits in milliseconds by metric, as `loadtest` takes them."""
        return {"ttft": self.ttft_ms * self.scale, "tpot": self.tpot_ms * self.scale}


SLOS = tuple(Slo(ttft, tpot, scale) for scale in (1.0, *(each for each in SCALES if each != 1.0)) for ttft, tpot in PAIRS)
"""Those that matter most come first: that is the order in which they are looked for."""


@dataclass(frozen=True)
class Run:
    """What one run at one rate gave."""

    step: int
    sent: int
    met: Mapping[str, int]
    """Number of requests within the limits, by name of the SLO."""


def rate_of(step: int) -> float:
    """Return the requests per second of a step of the grid."""
    return float(2 ** (step / STEPS_PER_DOUBLING))


def count_met(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Count the requests within the limits of each SLO. A request that failed, or was refused or dropped, is not."""
    return {slo.name: sum(is_good(record, slo.limits_ms) for record in records) for slo in SLOS}


def fitted(runs: Sequence[Run], slo: Slo) -> dict[int, float]:
    """Return the share of requests that meet the limits, by step. It never rises with the step."""
    pools: list[tuple[list[int], int, int]] = []
    for step in sorted({run.step for run in runs}):
        here = [run for run in runs if run.step == step]
        pool = [step], sum(run.met[slo.name] for run in here), sum(run.sent for run in here)
        while pools and pool[1] * pools[-1][2] > pools[-1][1] * pool[2]:
            steps, met, sent = pools.pop()
            pool = [*steps, *pool[0]], met + pool[1], sent + pool[2]
        pools.append(pool)
    return {step: met / sent for steps, met, sent in pools for step in steps}


def bracket(runs: Sequence[Run], slo: Slo) -> tuple[int | None, int | None]:
    """Return the highest good step and the lowest bad one, with None where there is none."""
    shares = fitted(runs, slo)
    good = [step for step, share in shares.items() if share >= ATTAINMENT]
    bad = [step for step, share in shares.items() if share < ATTAINMENT]
    return max(good, default=None), min(bad, default=None)


def next_step(runs: Sequence[Run], first: int) -> int | None:
    """Return a step that has not been run, for the first SLO whose bracket is not closed; None if all are."""
    for slo in SLOS:
        good, bad = bracket(runs, slo)
        if good is None and bad is None:
            return first
        if bad is None and good is not None and good < HIGHEST_STEP:
            return min(good + _JUMP, HIGHEST_STEP)
        if good is None and bad is not None and bad > LOWEST_STEP:
            return max(bad - _JUMP, LOWEST_STEP)
        if good is not None and bad is not None and bad - good > (1 if slo.scale == 1.0 else COARSE):
            return (good + bad) // 2
    return None


def goodput(runs: Sequence[Run], slo: Slo) -> tuple[float, float | None]:
    """Return the highest rate that was found good, 0 if none was, and the next one that was tried and is bad.

    The second is None if no higher rate was tried.
    """
    good, bad = bracket(runs, slo)
    return 0.0 if good is None else rate_of(good), None if bad is None else rate_of(bad)

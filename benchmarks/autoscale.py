"""The autoscaler beside other rules, in virtual time: `python -m benchmarks.autoscale --traces DIR [--scene hour|day]`.

    hour    Azure's two traces of 2023 together, an hour in ten minutes, and for a minute five times as many requests
    day     a synthetic day, the fourth of four alike: two peaks, noise, requests of the lengths of Azure's conversations

Workers are paced by the H200's profile, eight times as slow in the hour and 32 times in the day, so that a few requests a
second keep several of them busy. In the hour, whose holds and seasons are as compressed as itself, a worker starts within a
second, as paced ones do; in the day within 30 s. Rules:

    autoscaler     Tandem's
    queue depth    one worker more where more than two requests wait for each, one less where none has waited for the hold
    most, mean     sizes that never change: the most and the mean of the oracle's
    oracle         not run: what it would take to know the future. At each moment the smallest sizes that keep the limits, by
                   simulation, at the rate of the minute around it, and without any starts

A request is in time if it has its first token within 500 ms, and its others within 20 ms each, times as many as the workers
are slower. A rule takes some minutes.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autoscaler.capacity import WorkerLimits
from autoscaler.limits import Sizes
from autoscaler.scaler import Autoscaler, Present, ScalerRecord
from benchmarks.lib.environment import write_result
from benchmarks.lib.journal import add_state, journal_of
from configs.loader import load_config
from configs.paced.profile import PacedProfile, load_paced_profile
from configs.schema import ClusterConfig
from loadtest.datasets import TraceRow, azure_rows
from protocol.cluster_view import RouterObservation
from protocol.messages.workers import Role
from simulator.cluster import Shape, simulate
from simulator.profile import Profile
from simulator.request import Request
from simulator.scaling.cluster import Delays, ScaledCluster, Sized
from simulator.scaling.sizers import SizedByAutoscaler, Sizer

TTFT_S, TPOT_S = 0.5, 0.02
"""Of the H200."""
ATTAINMENT = 0.95
HOUR_IN_S = 600.0
STEP_AT, STEP_S, STEP_TIMES = 300.0, 60.0, 5
DAY_S = 86_400.0
MOST = Shape(32, 12)
HOLD_S = 120.0
"""Of a real hour: Tandem's default."""
_SAMPLES = 3000
"""Requests by which the oracle finds out what sizes can take."""
_TRIED = {Role.PREFILL: 3, Role.DECODE: 2}
"""Sizes that it tries. A further worker takes as much more as the last one of these did."""


@dataclass(frozen=True)
class Scene:
    """What is asked, and how fast time goes."""

    name: str
    arrivals: Sequence[tuple[float, int, int]]
    """Time, tokens of the prompt and of the answer."""
    seconds: float
    speed: float
    season_s: float
    slower: int
    """So many times what the profile says steps take."""
    start_s: float
    """Until a worker that is wanted takes requests."""
    warm: Sequence[float] = ()
    """Counts of former seasons."""

    def requests(self) -> list[Request]:
        """Made anew for each run, since runs write into them. No two prompts begin alike."""
        return [Request(index, at, (index,) * prompt, answer) for index, (at, prompt, answer) in enumerate(self.arrivals)]

    @property
    def delays(self) -> Delays:
        """How long a worker takes to come."""
        return Delays(self.start_s, 1.0)

    def attainment(self, requests: Sequence[Request]) -> float:
        """Share of the requests that are in time."""
        ttft_s, tpot_s = TTFT_S * self.slower, TPOT_S * self.slower
        good = sum(each.error is None and each.ttft_s <= ttft_s and each.tpot_s <= tpot_s for each in requests)
        return good / len(requests)

    @property
    def hold_s(self) -> float:
        """How long fewer workers must have been enough."""
        return HOLD_S / self.speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder that has Azure's traces")
    parser.add_argument("--scene", choices=("hour", "day"), default=None, help="this one alone")
    parser.add_argument("--result", default=None, help="name of the files to write among the results")
    add_state(parser)
    given = parser.parse_args()
    journal = journal_of(parser, given)
    rows = {name: azure_rows(given.traces / f"azure_llm_2023_{name}.csv") for name in ("conv", "code")}
    makers: Mapping[str, Callable[[], Scene]] = {"hour": partial(hour, rows), "day": partial(day, rows["conv"])}
    result: dict[str, Any] = {}
    for name in makers if given.scene is None else (given.scene,):
        result[name] = journal.once(name, partial(compared, makers[name]))
    if given.result is None:
        print(table(result))
    else:
        write_result(given.result, result, table(result))


def hour(rows: Mapping[str, Sequence[TraceRow]]) -> Scene:
    """Both traces at once, faster, with the step in it."""
    rng = np.random.default_rng(1)
    speed, slower = 3600.0 / HOUR_IN_S, 8
    arrivals = []
    for row in (*rows["conv"], *rows["code"]):
        at = row.arrival_s / speed
        again = STEP_TIMES if STEP_AT <= at < STEP_AT + STEP_S else 1
        times = [at, *(at + rng.uniform(-2.0, 2.0) for _ in range(again - 1))]
        # By the slower profile a worker takes an eighth of the requests, and so every eighth is asked.
        arrivals += [
            (max(0.0, each), max(1, row.input_len), max(1, row.output_len)) for each in times if rng.random() < 1 / slower
        ]
    return Scene("hour", sorted(arrivals), HOUR_IN_S, speed, 86_400.0 / speed, slower=slower, start_s=1.0)


def day(rows: Sequence[TraceRow]) -> Scene:
    """The fourth of four synthetic days. Of the first three the autoscaler knows the counts."""
    rng = np.random.default_rng(2)
    bins = [float(rng.poisson(_day_rate(at % DAY_S) * 900.0)) for at in np.arange(0.0, 3 * DAY_S, 900.0) + 450.0]
    arrivals, at, noise = [], 0.0, 0.0
    while at < DAY_S:
        noise = 0.999 * noise + rng.normal(0.0, 0.005)
        at += rng.exponential(1.0 / (_day_rate(at) * math.exp(noise)))
        row = rows[int(rng.integers(len(rows)))]
        arrivals.append((at, max(1, row.input_len), max(1, row.output_len)))
    return Scene("day", arrivals, DAY_S, 1.0, DAY_S, slower=32, start_s=30.0, warm=bins)


def _day_rate(at: float) -> float:
    """Requests per second at a time of the synthetic day: a night, a peak at 11 and a higher one at 16 hours."""
    hours = at / 3600.0
    peaks = 2.2 * math.exp(-(((hours - 11.0) / 2.2) ** 2)) + 3.2 * math.exp(-(((hours - 16.0) / 2.5) ** 2))
    return 0.5 + peaks


def compared(make: Callable[[], Scene]) -> dict[str, Any]:
    """All rules on one scene."""
    scene = make()
    config, paced = setting(scene)
    profile = Profile.of_paced(paced)
    oracle = Oracle(scene, config, profile)
    wanted = [oracle.sizes(at) for at in np.arange(0.0, scene.seconds, 1.0)]
    oracle_s = float(sum(sum(sizes.values()) for sizes in wanted))
    most = {role: max(sizes[role] for sizes in wanted) for role in Role}
    mean = {role: math.ceil(sum(sizes[role] for sizes in wanted) / len(wanted)) for role in Role}
    first = {role: wanted[0][role] for role in Role}
    limits = WorkerLimits(config.decode.max_batch_size, config.decode.kv_cache_tokens)
    needed = (Role.PREFILL, Role.DECODE)
    record = ScalerRecord(bins=tuple(scene.warm), latest_bin=-1)
    scaler = Autoscaler(config.autoscale, limits, paced, prefills=True, needed=needed, flips=True, now=0.0, record=record)
    ours = SizedByAutoscaler(scaler)
    rules: dict[str, tuple[Sizes, Sizer]] = {
        "autoscaler": (first, ours),
        "queue depth": (first, QueueDepth(scene.hold_s)),
        "most": (most, Static()),
        "mean": (mean, Static()),
    }
    runs = {}
    for name, (sizes, sizer) in rules.items():
        shape = Shape(sizes[Role.PREFILL], sizes[Role.DECODE])
        cluster = ScaledCluster(shape, MOST, config, profile, sizer, scene.delays)
        runs[name] = summary(cluster.run(scene.requests()), scene, oracle_s)
    runs["autoscaler"]["decisions"] = [(round(each.at), each.reason) for each in ours.decisions]
    return {
        "requests": len(scene.arrivals),
        "oracle_worker_hours": oracle_s / 3600,
        "oracle_most": {role.value: size for role, size in most.items()},
        "oracle_turns": {role.value: Sized([], 0.0, list(enumerate(wanted))).turns(role) for role in Role},
        "prefill_rates": oracle.rates[Role.PREFILL],
        "decode_rates": oracle.rates[Role.DECODE],
        "runs": runs,
    }


def setting(scene: Scene) -> tuple[ClusterConfig, PacedProfile]:
    """The configuration of all runs, and what steps take."""
    values = {
        "engine": "paced",
        "disaggregation": "always",
        "routing": "load",
        "block_size": 64,
        "autoscale.sizes": f"prefill=1..{MOST.prefill},decode=1..{MOST.decode}",
        "autoscale.slo": f"ttft:{TTFT_S * scene.slower * 1000:g},tpot:{TPOT_S * scene.slower * 1000:g}",
        "autoscale.hold_s": scene.hold_s,
        "autoscale.season_s": scene.season_s,
    }
    paced = load_paced_profile("h200-8b")
    slower: dict[str, Any] = {
        name: tuple(point.model_copy(update={"seconds": point.seconds * scene.slower}) for point in points)
        for name, points in (("prefill", paced.prefill), ("decode", paced.decode))
    }
    return load_config(None, values), paced.model_copy(update=slower)


class Static:
    """Sizes that never change."""

    def sizes(self, seen: RouterObservation, present: Present, now: float) -> Sizes | None:
        return None


class QueueDepth:
    """What a plain scaler does: it looks at what waits, a role for itself, every five seconds."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._looked_at = -math.inf
        self._waited_at = dict.fromkeys(Role, 0.0)

    def sizes(self, seen: RouterObservation, present: Present, now: float) -> Sizes | None:
        if now - self._looked_at < 5.0:
            return None
        self._looked_at = now
        sizes = dict(present.wanted)
        for role, most in ((Role.PREFILL, MOST.prefill), (Role.DECODE, MOST.decode)):
            waiting = sum(worker.waiting for worker in seen.workers if worker.role is role) + seen.waiting
            if waiting:
                self._waited_at[role] = now
            if waiting > 2 * sizes[role]:
                sizes[role] = min(most, sizes[role] + 1)
            elif now - self._waited_at[role] > self._hold_s and sizes[role] > 1:
                sizes[role] -= 1
                self._waited_at[role] = now
        return sizes


class Oracle:
    """Knows what comes, and what sizes are enough for it."""

    def __init__(self, scene: Scene, config: ClusterConfig, profile: Profile) -> None:
        self._scene = scene
        self._times = [at for at, _, _ in scene.arrivals]
        self._half_s = 30.0 / scene.speed
        peak = max(self._rate(at) for at in np.arange(0.0, scene.seconds, 1.0))
        rng = np.random.default_rng(3)
        picked = rng.integers(len(scene.arrivals), size=_SAMPLES)
        self._lengths = [scene.arrivals[index][1:] for index in picked]
        self.rates = {
            Role.PREFILL: self._enough(Role.PREFILL, lambda size: Shape(size, MOST.decode), peak, config, profile),
            Role.DECODE: self._enough(Role.DECODE, lambda size: Shape(MOST.prefill, size), peak, config, profile),
        }
        """The highest rate that 1, 2, ... workers of a role take, up to the peak's."""

    def sizes(self, at: float) -> Sizes:
        """The smallest sizes for the rate around a time."""
        rate = self._rate(at)
        return {role: bisect_left(rates, rate) + 1 for role, rates in self.rates.items()}

    def _rate(self, at: float) -> float:
        begin, end = at - self._half_s, at + self._half_s
        return (bisect_right(self._times, end) - bisect_left(self._times, begin)) / (2 * self._half_s)

    def _enough(
        self, role: Role, shape: Callable[[int], Shape], peak: float, config: ClusterConfig, profile: Profile
    ) -> list[float]:
        rates: list[float] = []
        gap = 0.5
        for size in range(1, _TRIED[role] + 1):
            takes = partial(self._takes, shape(size), config=config, profile=profile)
            low, high = (rates[-1] if rates else 0.0), (rates[-1] if rates else 0.0) + gap
            while high < 100 * peak and takes(high):
                low, high = high, high + gap
            for _ in range(4):
                middle = (low + high) / 2
                low, high = (middle, high) if takes(middle) else (low, middle)
            gap = max(gap, low - rates[-1] if rates else low)
            rates.append(low)
        while rates[-1] < peak:
            rates.append(rates[-1] + rates[_TRIED[role] - 1] - rates[_TRIED[role] - 2])
        return rates

    def _takes(self, shape: Shape, rate: float, config: ClusterConfig, profile: Profile) -> bool:
        rng = np.random.default_rng(4)
        times = np.cumsum(rng.exponential(1.0 / rate, len(self._lengths)))
        requests = [
            Request(index, float(at), (index,) * prompt, answer)
            for index, (at, (prompt, answer)) in enumerate(zip(times, self._lengths, strict=True))
        ]
        return self._scene.attainment(simulate(requests, shape, config, profile)) >= ATTAINMENT


def summary(sized: Sized, scene: Scene, oracle_s: float) -> dict[str, Any]:
    """What came of one rule."""
    return {
        "attainment": scene.attainment(sized.requests),
        "worker_hours": sized.worker_s / 3600,
        "beside_oracle": sized.worker_s / oracle_s,
        "turns": {role.value: sized.turns(role) for role in Role},
        "failed": sum(each.error is not None for each in sized.requests),
        "sizes": [(round(at), {role.value: size for role, size in sizes.items()}) for at, sizes in sized.changes],
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = []
    for name, scene in result.items():
        hours = f"{scene['requests']} requests, oracle {scene['oracle_worker_hours']:.2f} worker-hours"
        lines += [f"**{name}**: {hours}, at most {scene['oracle_most']['prefill']}P{scene['oracle_most']['decode']}D", ""]
        lines += ["| rule | in time | worker-hours / oracle's | turns of prefill, decode | failed |", "|---|---|---|---|---|"]
        for rule, run in scene["runs"].items():
            turns = f"{run['turns']['prefill']}, {run['turns']['decode']}"
            lines.append(f"| {rule} | {run['attainment']:.1%} | {run['beside_oracle']:.2f} | {turns} | {run['failed']} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

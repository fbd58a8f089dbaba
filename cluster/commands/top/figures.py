"""What follows from two polls of a cluster: rates, shares and quantiles. Pure.

The operators' page computes the same in `router/page/ops/figures.js`, and a test compares the two. Times are in seconds. A
figure is None where the polls do not tell it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from protocol.messages.workers import Duty

RATE_S = 3.0
"""Rates and busy fractions are of the last so many seconds."""
LATENCY_S = 30.0
"""Latencies, stages and cache hits are of the last so many seconds."""
_MOST_GAP_S = 6.0
"""After a longer silence figures begin anew."""

STAGES = {
    "queue": "tandem:request_queue_time_seconds",
    "prefill": "tandem:request_prefill_time_seconds",
    "decode": "tandem:request_decode_time_seconds",
}
"""The stages of a request that ended, and the histogram of each."""
FIRST_TOKEN = "tandem:time_to_first_token_seconds"
BETWEEN_TOKENS = "tandem:inter_token_latency_seconds"

_WAITING = "tandem:router_requests_waiting"
_TOKENS_IN = "tandem:prompt_tokens_total"
_TOKENS_OUT = "tandem:generation_tokens_total"
_FAMILIES = (*STAGES.values(), FIRST_TOKEN, BETWEEN_TOKENS, _WAITING, _TOKENS_IN, _TOKENS_OUT)
_SUMMED = frozenset(("model_name", "router"))
_ROLES = ("prefill", "decode")

Worker = Mapping[str, Any]
"""A row of /admin/status."""
Totals = Mapping[str, Mapping[str, float]]
"""Name of a sample to its values by its other labels, each summed over the routers."""


@dataclass(frozen=True)
class Poll:
    """One look at the cluster. `at_s` is of any clock that only goes forward."""

    at_s: float
    workers: Sequence[Worker]
    wanted: Mapping[str, int]
    model: str | None
    totals: Totals
    autoscaler: Mapping[str, Any] | None = None
    """State of the autoscaler, as /admin/status has it; None where pools do not size themselves."""
    rollout: Mapping[str, Any] | None = None
    """State of the latest rollout, as /admin/status has it; None if there was none."""

    @staticmethod
    def of(at_s: float, status: Mapping[str, Any], metrics: str) -> Poll:
        """Return what the answers of /admin/status and /metrics say."""
        model, totals = _read_metrics(metrics)
        return Poll(at_s, status["workers"], status["wanted"], model, totals, status.get("autoscaler"), status.get("rollout"))

    def of_role(self, role: str) -> list[Worker]:
        """Return the workers of a role, those that do both with the decode workers."""
        return [worker for worker in self.workers if Duty(worker["role"]).role.value == role]

    @property
    def roles(self) -> list[str]:
        """Roles that the cluster has or wants: a colocated one has no prefill workers."""
        return [role for role in _ROLES if role in self.wanted or self.of_role(role)]

    @property
    def readers(self) -> list[Worker]:
        """Return the prefill workers, or where there are none the decode workers, which compute the prompts then."""
        return self.of_role("prefill") or self.of_role("decode")

    def total(self, name: str, series: str | None = None) -> float:
        """Return what a sample says over all its labels, or for those that `series` joins."""
        family = self.totals.get(name, {})
        return sum(family.values()) if series is None else family.get(series, 0.0)


def _read_metrics(text: str) -> tuple[str | None, Totals]:
    """The name of the model, and the families that are used here."""
    wanted = "\n".join(line for line in text.split("\n") if line.startswith(_FAMILIES))
    model: str | None = None
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            model = model or sample.labels.get("model_name")
            series = " ".join(sample.labels[name] for name in sorted(sample.labels) if name not in _SUMMED)
            totals[sample.name][series] += sample.value
    return model, totals


class Polls:
    """The latest polls, as many as the figures need."""

    def __init__(self, interval_s: float = 1.0) -> None:
        """`interval_s` is the time from one poll to the next."""
        self._polls: list[Poll] = []
        self._most_gap_s = max(_MOST_GAP_S, 2 * interval_s)

    def add(self, poll: Poll) -> None:
        """Take the next poll."""
        if self._polls and poll.at_s - self._polls[-1].at_s > self._most_gap_s:
            self._polls.clear()
        self._polls.append(poll)
        while len(self._polls) > 2 and poll.at_s - self._polls[1].at_s >= LATENCY_S:
            del self._polls[0]

    @property
    def latest(self) -> Poll | None:
        """The latest poll."""
        return self._polls[-1] if self._polls else None

    def before(self, seconds: float) -> Poll | None:
        """Return the poll that is so much older than the latest one, or the oldest one; None while there is but one."""
        earlier = self._polls[:-1]
        old_enough = [poll for poll in earlier if self._polls[-1].at_s - poll.at_s >= seconds]
        return old_enough[-1] if old_enough else next(iter(earlier), None)


def growth(before: Poll, after: Poll, name: str, series: str | None = None) -> float:
    """Return what a counter has grown by. One that began anew has not grown."""
    return max(0.0, after.total(name, series) - before.total(name, series))


def token_rates(before: Poll, after: Poll) -> tuple[float, float]:
    """Return the prompt tokens and the answer tokens a second."""
    seconds = after.at_s - before.at_s
    return growth(before, after, _TOKENS_IN) / seconds, growth(before, after, _TOKENS_OUT) / seconds


def busy_fractions(before: Poll, after: Poll) -> dict[str, float | None]:
    """Return the share of the time between the polls in which each worker's engine computed.

    A step that is under way counts for as long as it has lasted. It is None for a worker that began a new life, or has not
    reported.
    """
    found: dict[str, float | None] = {worker["worker_id"]: None for worker in after.workers}
    for old, now in _same_lives(before, after, after.workers):
        if old["busy_s"] is not None and now["busy_s"] is not None:
            computed_s = now["busy_s"] + now["step_age_s"] - (old["busy_s"] + old["step_age_s"])
            found[now["worker_id"]] = min(1.0, max(0.0, computed_s / (after.at_s - before.at_s)))
    return found


def _same_lives(before: Poll, after: Poll, workers: Sequence[Worker]) -> Iterator[tuple[Worker, Worker]]:
    """Both rows of each worker that has not begun a new life between the polls."""
    earlier = {worker["worker_id"]: worker for worker in before.workers}
    for now in workers:
        old = earlier.get(now["worker_id"])
        if old is not None and old["epoch"] == now["epoch"]:
            yield old, now


def role_busy(before: Poll, after: Poll, role: str) -> float | None:
    """Return the mean busy fraction of a role's workers, None if it is known of none."""
    fractions = busy_fractions(before, after)
    known = [each for worker in after.of_role(role) if (each := fractions[worker["worker_id"]]) is not None]
    return sum(known) / len(known) if known else None


def request_counts(poll: Poll) -> tuple[int, int]:
    """Return how many requests workers compute, and how many wait.

    A request whose prompt is read holds a ticket at a decode worker, too, and counts once: where there are prefill workers,
    what waits at decode workers is left out.
    """
    readers = poll.readers
    running = sum(worker["running"] or 0 for worker in poll.workers)
    return running, round(poll.total(_WAITING)) + sum(worker["waiting"] or 0 for worker in readers)


def stage_means(before: Poll, after: Poll) -> dict[str, float] | None:
    """Return the mean seconds of each stage, of the requests that ended between the polls; None if none did."""
    means = {stage: _mean(before, after, family) for stage, family in STAGES.items()}
    known = {stage: mean for stage, mean in means.items() if mean is not None}
    return known if len(known) == len(means) else None


def _mean(before: Poll, after: Poll, family: str) -> float | None:
    count = growth(before, after, f"{family}_count")
    return growth(before, after, f"{family}_sum") / count if count else None


def quantile(before: Poll, after: Poll, family: str, share: float) -> float | None:
    """Return a quantile of what a histogram observed between the polls, read as Prometheus' histogram_quantile does.

    Within a bucket the observations count as spread evenly. Above the last bound it is that bound. None without any.
    """
    name = f"{family}_bucket"
    bounds = sorted((float(label), label) for label in after.totals.get(name, {}))
    counts = [(bound, growth(before, after, name, label)) for bound, label in bounds]
    if not counts or not counts[-1][1]:
        return None
    rank = share * counts[-1][1]
    index = next(index for index, (_, count) in enumerate(counts) if count >= rank)
    upper, count = counts[index]
    lower, below = counts[index - 1] if index else (0.0, 0.0)
    if math.isinf(upper):
        return lower
    return lower + (upper - lower) * ((rank - below) / (count - below or 1.0))


def cache_hits(before: Poll, after: Poll) -> float | None:
    """Return the share of looked-up prompt tokens whose KV was there; None if none were looked up between the polls."""
    hits = queries = 0
    for old, now in _same_lives(before, after, after.readers):
        if old["prefix_cache_queries"] is not None and now["prefix_cache_queries"] is not None:
            hits += now["prefix_cache_hits"] - old["prefix_cache_hits"]
            queries += now["prefix_cache_queries"] - old["prefix_cache_queries"]
    return hits / queries if queries > 0 else None

"""From records to figures, by `vllm bench serve`'s definitions and under its names. Pure.

TTFT, E2EL and the second token count from the moment a request was sent. Figures with `planned_` in front count from the moment
at which it was to be sent, so a wait for `--max-concurrency` is in them; without it they differ by the client's own lateness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadtest.records import RequestRecord
from protocol.errors import InvalidRequestError

METRICS = {
    "ttft": "Time to first token",
    "ttst": "Time to second token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
    "planned_ttft": "First token, since planned",
    "planned_e2el": "End to end, since planned",
}
GOALS = ("ttft", "ttst", "tpot", "e2el", "planned_ttft", "planned_e2el")
"""Metrics of which a request has one value, so that it can meet a limit."""


def parse_metrics(text: str) -> tuple[str, ...]:
    """Read names of METRICS, such as `ttft,tpot`. Raises InvalidRequestError for unknown ones."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in METRICS:
            raise InvalidRequestError(
                f"percentile-metrics knows {', '.join(METRICS)}; not {name!r:.40}", param="percentile_metrics"
            )
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Read percentiles, such as `50,90,99.9`. Raises InvalidRequestError for what is no number from 0 to 100."""
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = (math.nan,)
    if not all(0 <= value <= 100 for value in values):
        raise InvalidRequestError(
            f"metric-percentiles must be numbers from 0 to 100, such as 50,90,99; got {text!r:.40}", param="metric_percentiles"
        )
    return values


def parse_goodput(parts: Sequence[str], *, flag: str = "goodput", metrics: Sequence[str] = GOALS) -> dict[str, float]:
    """Read limits in milliseconds, such as `["ttft:500", "tpot:50"]`, by metric of `metrics`.

    Raises InvalidRequestError, naming the flag.
    """
    limits: dict[str, float] = {}
    for part in parts:
        name, _, text = part.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in metrics or not limit > 0 or name in limits:
            raise InvalidRequestError(
                f"{flag} takes METRIC:MILLISECONDS, such as ttft:500, each of {', '.join(metrics)} once; got {part!r:.40}",
                param=flag,
            )
        limits[name] = limit
    return limits


def value_of(record: RequestRecord, metric: str) -> float | None:
    """Return a request's value of a metric of GOALS in seconds, or None if the request has none."""
    if metric == "planned_ttft":
        return None if record.ttft is None else record.client_wait + record.ttft
    if metric == "planned_e2el":
        return record.client_wait + record.e2el
    value: float | None = getattr(record, metric)
    return value


def is_good(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    """Whether a request came to its end within all limits (ms by metric).

    As in vLLM, an answer of one token meets any limit for those after it.
    """
    if not record.ok:
        return False
    values = {metric: value_of(record, metric) for metric in goodput}
    return all(value is None or value * 1000 <= goodput[metric] for metric, value in values.items())


def values_of(records: Sequence[RequestRecord], metric: str) -> list[float]:
    """Return all values of a metric in seconds, of requests that came to their end."""
    done = [record for record in records if record.ok]
    if metric == "itl":
        return [gap for record in done for gap in record.itl]
    values = (value_of(record, metric) for record in done)
    return [value for value in values if value is not None]


def percentile_name(percentile: float) -> str:
    """Return the name of a percentile, such as p99 or p99.9."""
    return f"p{percentile:g}"


def summarize(
    records: Sequence[RequestRecord],
    duration_s: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Return the figures of a run under vLLM's names, with times in ms.

    `duration_s` is the time from the run's start to the end of the last request.

    Failed requests and those without an answer are in none of the times, and count as misses of the goodput.
    """
    done = [record for record in records if record.ok]
    num_output = sum(record.completion_tokens for record in done)
    num_input = sum(record.input_tokens for record in done)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _ratio(len(done), duration_s),
        "output_throughput": _ratio(num_output, duration_s),
        "total_token_throughput": _ratio(num_input + num_output, duration_s),
    }
    if goodput:
        num_good = sum(is_good(record, goodput) for record in records)
        result["request_goodput"] = _ratio(num_good, duration_s)
        result["goodput_attainment"] = _ratio(num_good, len(records))
    for metric in metrics:
        values = [value * 1000 for value in values_of(records, metric)]
        result |= {f"{name}_{metric}_ms": value for name, value in spread(values, percentiles).items()}
    return result


def stage_shares(records: Sequence[RequestRecord]) -> dict[str, dict[str, float]]:
    """Return where the time of answered requests went, by stage, as the server told.

    Each stage has its mean and p99 in ms, and its share of all time. A request that did not reach a stage spent no time there.
    """
    told = [record.server_times for record in records if record.ok and record.server_times is not None]
    stages = dict.fromkeys(stage for times in told for stage in times)
    by_stage = {stage: [times.get(stage, 0.0) for times in told] for stage in stages}
    total = sum(sum(values) for values in by_stage.values())
    return {
        stage: {
            "mean_ms": 1000 * float(np.mean(values)),
            "p99_ms": 1000 * float(np.percentile(values, 99)),
            "share": _ratio(sum(values), total),
        }
        for stage, values in by_stage.items()
    }


def spread(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles by their names.

    Nothing is known of no values: null in JSON, and no zero that looks like a fine latency.
    """
    if not values:
        return dict.fromkeys(("mean", "median", "std", *map(percentile_name, percentiles)))
    known: dict[str, float | None] = {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "std": float(np.std(values)),
    }
    return known | {percentile_name(each): float(np.percentile(values, each)) for each in percentiles}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

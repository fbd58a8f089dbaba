"""Where the time of requests goes."""

from __future__ import annotations

from deploy.grafana.boards.shared import BURN_RATES, BY_RULES, GAPS, TIME_TO_FIRST_TOKEN
from deploy.grafana.panels import Board, Query, gauge, lines, quantiles, rate, row


def _mean(histogram: str) -> Query:
    return rate(f"{histogram}_sum") / rate(f"{histogram}_count")


_STAGES = row(
    "Stages",
    lines(
        "Mean time of a request, by stage",
        "s",
        _mean("tandem:request_queue_time_seconds").named("waits"),
        _mean("tandem:request_prefill_time_seconds").named("prefill"),
        _mean("tandem:request_decode_time_seconds").named("decode"),
        about="Of requests that ended well.",
        stacked=True,
    ).wide(),
    quantiles(
        "Wait", "tandem:request_queue_time_seconds", "At the router for room, and in the queue of a prefill worker."
    ).wide(),
    quantiles("Prefill", "tandem:request_prefill_time_seconds", "As the worker reports it.").wide(),
    quantiles(
        "Handoff",
        "tandem:request_handoff_time_seconds",
        "From the first token until the decode worker had the KV. A part of decode. What is sent while the prompt is still "
        "computed takes nobody's time, and is not in it.",
    ).wide(),
    quantiles("Decode", "tandem:request_decode_time_seconds", "From the first to the last token, with the handoff.").wide(),
)

_OBJECTIVES = row(
    "Objectives",
    lines(
        "Good events",
        "percentunit",
        rate("tandem_slo:good_total", "slo") / rate("tandem_slo:all_total", "slo"),
        Query("max by (slo) (tandem_slo:objective)", "{{slo}}, objective"),
        about=f"First tokens and gaps within their limits, and requests that did not fail, as shares. {BY_RULES}",
    ).wide(),
    BURN_RATES.wide(),
)

_ENGINES = row(
    "Engines and moves",
    lines(
        "Mean time of a step",
        "s",
        rate("tandem:engine_busy_seconds_total", "worker") / rate("tandem:engine_steps_total", "worker"),
    ),
    lines(
        "Age of the current step",
        "s",
        gauge("tandem:engine_step_age_seconds", "worker", how="max"),
        about="A worker whose step goes on and on is stuck.",
    ),
    quantiles("Pause of a stream that moves", "tandem:migration_pause_seconds", "From one decode worker to another."),
)

LATENCY = Board(
    "tandem-latency",
    "Tandem: latency by stage",
    "Where does the time of requests go?",
    (
        row(
            "What clients see",
            TIME_TO_FIRST_TOKEN,
            GAPS,
            quantiles("Whole requests", "tandem:e2e_request_latency_seconds", "From arrival to end."),
        ),
        _STAGES,
        _OBJECTIVES,
        _ENGINES,
    ),
)

"""Whether everything is well, on one page."""

from __future__ import annotations

from deploy.grafana.boards.gpus import GPUS
from deploy.grafana.boards.shared import (
    ALERTS,
    BURN_RATES,
    BUSY_ROLES,
    BY_RULES,
    ERRORS,
    GAPS,
    TIME_TO_FIRST_TOKEN,
    WORKERS,
)
from deploy.grafana.panels import PER_S, Board, Query, gauge, lines, number, rate, row

_COUNTED = rate("tandem_slo:all_total", where='slo="errors"')
_GOOD = rate("tandem_slo:good_total", where='slo="errors"')
_OF_CLUSTERS = "instance, model_name"
# A prompt at a prefill worker has its room at a decode worker, too, and waits there as well: it counts once.
_READ_BY_PREFILL = gauge("tandem:num_requests_waiting", _OF_CLUSTERS, 'role="prefill"')
_READ_ANYWHERE = gauge("tandem:num_requests_waiting", _OF_CLUSTERS)
_AT_WORKERS = gauge("tandem:num_requests_running") + Query(f"sum({_READ_BY_PREFILL.expr} or {_READ_ANYWHERE.expr})")

_NOW = row(
    "Now",
    number("Requests that ended well", "reqps", rate("tandem:request_success_total")),
    number("Tokens of answers", PER_S, rate("tandem:generation_tokens_total")),
    number(
        "Requests under way",
        "short",
        _AT_WORKERS.named("at workers"),
        gauge("tandem:router_requests_waiting").named("wait for room"),
    ),
    number(
        "Requests that failed", "percentunit", (_COUNTED - _GOOD) / _COUNTED, about=f"By a fault of the cluster. {BY_RULES}"
    ),
    number(
        "Workers",
        "short",
        gauge("tandem:workers", where='state="ready"').named("ready"),
        gauge("tandem:workers_wanted").named("wanted"),
    ),
    number(
        "Alerts", "short", Query(f"count({ALERTS.expr})").or_zero(), about="From the rules in deploy/prometheus/alerts.yml."
    ),
)

_TRAFFIC = row(
    "Traffic",
    lines(
        "Requests that ended well",
        "reqps",
        rate("tandem:request_success_total", "finished_reason"),
        about="By the reason for which the answer ended.",
    ),
    ERRORS,
    lines(
        "Tokens",
        PER_S,
        rate("tandem:prompt_tokens_total").named("of prompts"),
        rate("tandem:generation_tokens_total").named("of answers"),
    ),
)

_DRAFTED, _ACCEPTED = rate("tandem:spec_decode_num_draft_tokens_total"), rate("tandem:spec_decode_num_accepted_tokens_total")
_GUESSES = row(
    "Guessed tokens",
    lines(
        "Guessed tokens",
        PER_S,
        _DRAFTED.named("guessed"),
        _ACCEPTED.named("right"),
        about="With --speculative-config. What was guessed and is wrong took a row of a step for nothing.",
    ).wide(),
    lines(
        "Share of guessed tokens that were right",
        "percentunit",
        Query(f"{_ACCEPTED.expr} / ({_DRAFTED.expr} > 0)", "share").or_zero(),
        about="0 while nothing is guessed.",
    ).wide(),
)

_KV_POOLS = lines(
    "KV pools, by role",
    "percentunit",
    gauge("tandem:kv_cache_usage_perc", "role", how="max").named("{{role}}, fullest"),
    gauge("tandem:kv_cache_usage_perc", "role", how="avg").named("{{role}}, mean"),
    about="Share of a pool's blocks that requests hold. Blocks that only the prefix cache holds count as free.",
)

OVERVIEW = Board(
    "tandem-overview",
    "Tandem: overview",
    "Is everything well? Traffic, latency against the objectives, workers and memory.",
    (
        _NOW,
        _TRAFFIC,
        row("Latency", TIME_TO_FIRST_TOKEN, GAPS, BURN_RATES),
        row("Workers", WORKERS, BUSY_ROLES, _KV_POOLS),
        _GUESSES,
        GPUS,
    ),
)

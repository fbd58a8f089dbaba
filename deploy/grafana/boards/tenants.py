"""Who uses how much."""

from __future__ import annotations

from deploy.grafana.panels import PER_S, Board, Query, bars, gauge, increase, lines, rate, row

_PROMPTS, _ANSWERS = "tandem:tenant_prompt_tokens_total", "tandem:tenant_generation_tokens_total"
_CHOSEN = 'tenant=~"$tenant"'
_OF_CLUSTER = 'instance=~"$instance"'

_USE = row(
    "Use",
    lines("Tokens of prompts", PER_S, rate(_PROMPTS, "tenant", _CHOSEN), stacked=True).wide(),
    lines("Tokens of answers", PER_S, rate(_ANSWERS, "tenant", _CHOSEN), stacked=True).wide(),
    bars("Tokens of prompts, in the time shown", "short", increase(_PROMPTS, "tenant", _CHOSEN)).wide(),
    bars("Tokens of answers, in the time shown", "short", increase(_ANSWERS, "tenant", _CHOSEN)).wide(),
    lines(
        "Share of the answers",
        "percentunit",
        Query(
            f"{rate(_ANSWERS, 'tenant', _CHOSEN).expr} / ignoring (tenant) group_left () {rate(_ANSWERS).expr}", "{{tenant}}"
        ),
        stacked=True,
    ).wide(),
    lines("Tenants with traffic", "short", Query(f"count({rate(_PROMPTS, 'tenant').expr} > 0)", "tenants").or_zero()).wide(),
)

_LIMITS = row(
    "Limits and keys",
    lines(
        "Requests refused for want of room",
        "reqps",
        rate("tandem:request_errors_total", "code", 'code=~"overloaded|tenant_full"').or_zero(),
        about="Of all tenants.",
    ),
    lines("Requests that wait for room", "short", gauge("tandem:router_requests_waiting", "router")),
    lines(
        "Problems of the file of API keys",
        "short",
        gauge("tandem:api_keys_skipped", how="max").named("entries that are refused"),
        gauge("tandem:api_keys_outdated", how="max").named("the file can't be read"),
    ),
)

_LOG = row(
    "Usage log",
    lines(
        "Requests in the usage log",
        "reqps",
        rate("tandem:usage_events_total", "tenant, outcome", _CHOSEN).or_zero(),
        about="0 without `--usage-log`.",
    ).wide(),
    lines("Events that wait for the log", "short", gauge("tandem:usage_events_waiting", "router")).wide(),
    lines(
        "Lines that wait for Kafka",
        "short",
        Query(f"sum(tandem:usage_kafka_lag_events{{{_OF_CLUSTER}}})", "lines").or_zero(),
        about="0 without `--usage-kafka`.",
    ).wide(),
    lines(
        "Events and lines that are lost",
        PER_S,
        rate("tandem:usage_events_lost_total").named("to the log"),
        Query(f"sum(rate(tandem:usage_kafka_lost_events_total{{{_OF_CLUSTER}}}[$rate]))", "to Kafka").or_zero(),
        about="To the log: its owner was away for long. To Kafka: the log's bound has removed them first.",
    ).wide(),
)

TENANTS = Board(
    "tandem-tenants",
    "Tandem: tenants",
    "Who uses how much? A cluster without API keys has one tenant, without a name. Beyond 100, all others are one.",
    (_USE, _LIMITS, _LOG),
    by_tenant=True,
)

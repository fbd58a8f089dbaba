"""Panels that several dashboards show."""

from __future__ import annotations

from deploy.grafana.panels import Query, gauge, lines, quantiles, rate

BY_RULES = "From the rules in deploy/prometheus/recording.yml."

TIME_TO_FIRST_TOKEN = quantiles(
    "Time to first token", "tandem:time_to_first_token_seconds", "From a request's arrival at the router."
)
GAPS = quantiles(
    "Gaps between tokens", "tandem:inter_token_latency_seconds", "Between two outputs of a stream, as the router gets them."
)
BURN_RATES = lines(
    "Burn rates",
    "suffix: x",
    Query("max by (slo) (tandem_slo:burn_rate1h{$of})", "{{slo}}, 1 h"),
    Query("max by (slo) (tandem_slo:burn_rate6h{$of})", "{{slo}}, 6 h"),
    about=f"Bad events as a multiple of what the objective allows: 1 is just allowed. {BY_RULES}",
)
ERRORS = lines(
    "Requests that failed",
    "reqps",
    rate("tandem:request_errors_total", "code"),
    about="By error code. `cancelled` is a client that went away.",
)
WORKERS = lines(
    "Workers",
    "short",
    gauge("tandem:workers", "role, state"),
    gauge("tandem:workers_wanted", "role").named("{{role}} wanted"),
)
BUSY_ROLES = lines(
    "Busy engines, by role",
    "percentunit",
    Query("avg by (role) (rate(tandem:engine_busy_seconds_total{$of}[$rate]))", "{{role}}"),
    about="Share of the time in which engines compute. The role that is busier is the one to enlarge.",
)
TICKETS = lines("Tickets", "short", gauge("tandem:tickets", "worker"), about="Streams that own KV blocks.")
ALERTS = Query('ALERTS{alertname=~"Tandem.+", alertstate="firing", instance=~"$instance"}')

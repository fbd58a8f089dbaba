"""What broke, and what came of it."""

from __future__ import annotations

from deploy.grafana.boards.shared import ALERTS, ERRORS, TICKETS
from deploy.grafana.panels import PER_S, Board, Query, gauge, lines, rate, row

_WORKERS = row(
    "Workers",
    lines(
        "Workers started anew",
        PER_S,
        rate("tandem:worker_restarts_total", "worker"),
        about="After their process ended, or on request.",
    ),
    lines(
        "Workers that are missing",
        "short",
        (gauge("tandem:workers_wanted", "role") - gauge("tandem:workers", "role", 'state="ready"')).named("{{role}}"),
    ),
    lines("Connections to workers lost", PER_S, rate("tandem:workers_lost_total", "router")),
)

_STREAMS = row(
    "Requests and streams",
    ERRORS,
    lines(
        "Streams resumed",
        PER_S,
        rate("tandem:resumed_streams_total", "router"),
        about="Streams that went on after a worker's death or a client's reconnection.",
    ),
    lines(
        "Streams of several arithmetics",
        PER_S,
        rate("tandem:inexact_streams_total", "reason").or_zero(),
        about="One arithmetic alone might have answered otherwise.",
    ),
)

_KV = row(
    "KV",
    lines("KV that did not arrive whole", PER_S, rate("tandem:kv_transfer_failures_total", "router")),
    lines(
        "Streams that did not move",
        PER_S,
        rate("tandem:migrations_total", "reason, outcome", 'outcome!="moved"').or_zero(),
    ),
    lines("Copies that were not made", PER_S, rate("tandem:kv_copies_total", "outcome", 'outcome!="copied"').or_zero()),
)

_LEAKS = row(
    "Leaks and alerts",
    lines(
        "Leaks found by the latest audit",
        "short",
        gauge("tandem:audit_leaks", how="max").named("leaks"),
        about="An audit runs once a minute. `tandem audit` names what it finds.",
    ),
    TICKETS,
    lines(
        "Alerts that fire",
        "short",
        Query(f"count by (alertname, severity) ({ALERTS.expr})", "{{alertname}} ({{severity}})").or_zero(),
        about="From the rules in deploy/prometheus/alerts.yml.",
    ),
)

_ROLLOUT = row(
    "Rollout",
    lines(
        "Share of new requests that a new configuration gets",
        "percentunit",
        gauge("tandem:rollout_share", how="max").named("share").or_zero(),
    ),
    lines(
        "Workers by the revision of their configuration", "short", gauge("tandem:rollout_workers", "role, revision").or_zero()
    ),
    lines("Phase of the latest rollout", "short", gauge("tandem:rollout_phase", "phase").or_zero()),
)

FAILURES = Board(
    "tandem-failures",
    "Tandem: failures",
    "What broke, what came of it, and does anything leak?",
    (_WORKERS, _STREAMS, _KV, _LEAKS, _ROLLOUT),
)

"""Whether prefill and decode have the right sizes, and whether work is spread evenly."""

from __future__ import annotations

from deploy.grafana.boards.shared import BUSY_ROLES, WORKERS
from deploy.grafana.panels import PER_S, Board, Query, gauge, lines, rate, row

_ENGINES = row(
    "Engines",
    BUSY_ROLES,
    lines("Busy engines", "percentunit", rate("tandem:engine_busy_seconds_total", "worker")),
    WORKERS,
    lines(
        "Tokens computed",
        PER_S,
        rate("tandem:engine_tokens_total", "role"),
        about="Of prompts at prefill workers, of answers at decode workers.",
    ),
    lines(
        "Tokens in a step",
        "short",
        rate("tandem:engine_tokens_total", "role") / rate("tandem:engine_steps_total", "role"),
        about="At decode workers it is the size of the batch.",
    ),
    lines("Steps", PER_S, rate("tandem:engine_steps_total", "worker")),
)

_WAIT_FOR_PREFILL = gauge("tandem:num_requests_waiting", where='role="prefill"')
_AT_PREFILL = _WAIT_FOR_PREFILL + gauge("tandem:num_requests_running", where='role="prefill"')
# Whose prompt a prefill worker has holds room at a decode worker meanwhile, and counts there as one that waits.
_AT_DECODE = gauge("tandem:num_requests_waiting", where='role!="prefill"')
_WAIT_FOR_DECODE = Query(f"clamp_min({_AT_DECODE.expr} - ({_AT_PREFILL.or_zero().expr}), 0)")

_QUEUES = row(
    "Queues",
    lines(
        "Requests that wait",
        "short",
        gauge("tandem:router_requests_waiting").named("at routers"),
        _WAIT_FOR_PREFILL.named("at prefill workers"),
        _WAIT_FOR_DECODE.named("at decode workers"),
        about="At routers they wait for room at any worker. At decode workers, those whose prompts are read already.",
    ),
    lines("Prompt tokens not yet computed", "short", gauge("tandem:queued_prompt_tokens", "worker")),
    lines("Sequences in the current step", "short", gauge("tandem:num_requests_running", "worker")),
)

_BETWEEN = row(
    "Between the roles",
    lines(
        "Where prompts are computed",
        "reqps",
        rate("tandem:disaggregation_decisions_total", "decision"),
        about="there: at a prefill worker; here: where they are decoded.",
    ).wide(),
    lines("Prompt tokens computed, by role", PER_S, rate("tandem:prefilled_tokens_total", "role")).wide(),
    lines(
        "Streams that moved",
        PER_S,
        rate("tandem:migrations_total", "reason, outcome"),
        about="From one decode worker to another, for a drain, a flip or for balance.",
    ).wide(),
    lines("Workers that changed their role", PER_S, rate("tandem:role_flips_total", "worker")).wide(),
    lines(
        "Decisions of the autoscaler",
        PER_S,
        rate("tandem:autoscaler_decisions_total", "role, direction").or_zero(),
        about="up: more workers of the role are wanted; down: fewer. A flip is one of each.",
    ).wide(),
)

BALANCE = Board(
    "tandem-balance",
    "Tandem: balance of prefill and decode",
    "Which role is short, and is work spread evenly over its workers?",
    (_ENGINES, _QUEUES, _BETWEEN),
)

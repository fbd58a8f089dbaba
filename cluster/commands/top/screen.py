"""Draws the latest polls as one screen: a few lines on the whole cluster, and a table for each role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.commands.lib.tables import autoscaler_lines, rollout_lines
from cluster.commands.top.figures import (
    BETWEEN_TOKENS,
    FIRST_TOKEN,
    LATENCY_S,
    RATE_S,
    Poll,
    Polls,
    Worker,
    busy_fractions,
    cache_hits,
    quantile,
    request_counts,
    role_busy,
    stage_means,
    token_rates,
)

_WIDE = 150
"""With so many columns both tables stand side by side."""
_LINES_ABOVE = 2
"""A table's title and headings."""
_MOST_TROUBLES = 4
_BAR = 8
_LEFT = ("worker", "state", "busy")
_RIGHT = ("kv", "run", "wait", "queued", "cached", "restarts")
_STYLES = {"starting": "yellow", "draining": "yellow", "out of reach": "red"}


def draw(polls: Polls, size: tuple[int, int] | None, problem: str | None) -> RenderableType:
    """Return the screen.

    `size` has the columns and the lines that there are; None for as many as are wanted. `problem` says why the figures are old.
    """
    poll = polls.latest
    if poll is None:
        return Text(problem or "connecting", style="red" if problem else "")
    head, troubles = _head(polls, poll), _troubles(poll)
    if problem:
        head.append(Text(problem, style="bold red"))
    side_by_side, rows = False, None
    if size is not None:
        columns, lines = size
        troubles = troubles[:_MOST_TROUBLES]
        for line in (*head, *troubles):
            line.no_wrap, line.overflow = True, "ellipsis"
        side_by_side = columns >= _WIDE
        rows = lines - len(head) - len(troubles) - 1
        rows = (rows if side_by_side else rows // max(1, len(poll.roles))) - _LINES_ABOVE
    before = polls.before(RATE_S)
    tables = [_table(poll, before, role, rows) for role in poll.roles]
    return Group(*head, Text(), _beside(tables) if side_by_side else Group(*tables), *troubles)


def _beside(tables: Sequence[Table]) -> Table:
    grid = Table.grid(padding=(0, 4))
    grid.add_row(*tables)
    return grid


def _head(polls: Polls, poll: Poll) -> list[Text]:
    """What holds for the whole cluster, a line for each question."""
    recent, longer = polls.before(RATE_S), polls.before(LATENCY_S)
    running, waiting = request_counts(poll)
    tokens_in, tokens_out = token_rates(recent, poll) if recent else (None, None)
    cached = _percent(cache_hits(longer, poll) if longer else None)
    first = [Text(poll.model or "-", style="bold"), *(_role(poll, role) for role in poll.roles)]
    return [
        Text("   ").join([*first, Text(f"{running} running, {waiting} waiting")]),
        Text(f"tokens/s: {_short(tokens_in)} in, {_short(tokens_out)} out   prompt cached: {cached}"),
        Text(_stages(longer, poll)),
        Text(_latencies(longer, poll)),
        *_autoscaler(poll),
        *_rollout(poll),
    ]


def _role(poll: Poll, role: str) -> Text:
    ready = sum(worker["state"] == "ready" for worker in poll.of_role(role))
    wanted = poll.wanted.get(role, 0)
    return Text(f"{role} {ready}/{wanted}", style="yellow" if ready < wanted else "")


def _autoscaler(poll: Poll) -> list[Text]:
    """Why the pools have their sizes, where they size themselves."""
    state = poll.autoscaler
    lines = autoscaler_lines(state)
    wrong = state is not None and (state["paused"] or state["problem"])
    return [Text("   ".join(lines), style="yellow" if wrong else "")] if lines else []


def _rollout(poll: Poll) -> list[Text]:
    """How a configuration is rolled out, or how that has ended."""
    style = "yellow" if poll.rollout is not None and poll.rollout["reason"] else ""
    return [Text(line, style=style) for line in rollout_lines(poll.rollout)]


def _stages(before: Poll | None, poll: Poll) -> str:
    means = stage_means(before, poll) if before else None
    if means is None:
        return f"time: no request has ended within {LATENCY_S:g} s"
    whole = sum(means.values()) or 1.0
    return "time: " + ", ".join(f"{stage} {_seconds(mean)} ({mean / whole:.0%})" for stage, mean in means.items())


def _latencies(before: Poll | None, poll: Poll) -> str:
    parts = []
    for name, family in (("first token", FIRST_TOKEN), ("between tokens", BETWEEN_TOKENS)):
        values = [quantile(before, poll, family, share) if before else None for share in (0.5, 0.99)]
        parts.append(f"{name}: p50 {_seconds(values[0])}, p99 {_seconds(values[1])}")
    return "   ".join(parts)


def _table(poll: Poll, before: Poll | None, role: str, rows: int | None) -> Table:
    """The workers of a role. The last ones are left out where there is no room for that many rows."""
    busy: Mapping[str, float | None] = busy_fractions(before, poll) if before else {}
    mean = _percent(role_busy(before, poll, role) if before else None)
    table = Table(
        box=None, pad_edge=False, padding=(0, 1), title=f"{role}, {mean} busy", title_justify="left", title_style="bold"
    )
    for name in (*_LEFT, *_RIGHT):
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    workers = sorted(poll.of_role(role), key=_order)
    shown = workers if rows is None or len(workers) <= rows else workers[: max(0, rows - 1)]
    for worker in shown:
        table.add_row(*_cells(worker, busy.get(worker["worker_id"])))
    if len(shown) < len(workers):
        table.add_row(f"{len(workers) - len(shown)} more", style="dim")
    return table


def _cells(worker: Worker, busy: float | None) -> Sequence[str]:
    state = _state(worker)
    style = _STYLES.get(state)
    return (
        escape(worker["worker_id"]) + (" [dim]both[/]" if worker["role"] == "both" else ""),
        f"[{style}]{state}[/]" if style else state,
        _busy(busy),
        _percent(worker["kv_usage"]),
        *(_short(worker[name]) for name in ("running", "waiting", "queued_tokens", "cached_tokens")),
        _short(worker["restarts"]),
    )


def _state(worker: Worker) -> str:
    return "out of reach" if worker["state"] == "ready" and not worker["linked"] else str(worker["state"])


def _order(worker: Worker) -> tuple[str, int, str]:
    """prefill-10 after prefill-9."""
    name, _, number = str(worker["worker_id"]).rpartition("-")
    return name, int(number) if number.isdecimal() else 0, worker["worker_id"]


def _troubles(poll: Poll) -> list[Text]:
    """Why workers are not ready or were started anew, a line for each."""
    troubled = [worker for worker in sorted(poll.workers, key=_order) if worker["last_error"]]
    return [
        Text(f"{worker['worker_id']}: {worker['last_error']}", style="red" if worker["state"] == "starting" else "dim")
        for worker in troubled
    ]


def _busy(share: float | None) -> str:
    if share is None:
        return "-"
    filled = round(share * _BAR)
    return f"[green]{'█' * filled}[/][dim]{'·' * (_BAR - filled)}[/] {share:>4.0%}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _short(number: Any) -> str:
    """1234567 as 1.2M."""
    if number is None:
        return "-"
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.{1 if number < 9.95 * unit else 0}f}{sign}"
    return f"{number:.0f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"

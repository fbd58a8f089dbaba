"""Tables for `tandem status`, `tandem models` and `tandem usage`, and the console for those of `tandem keys`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from configs.models import ListedModel
    from telemetry.usage.reading import UsageSum, UsageSums

_COLUMNS = {
    "worker": "worker_id",
    "role": "role",
    "epoch": "epoch",
    "state": "state",
    "node": "node",
    "pid": "pid",
    "busy": "busy",
    "run": "running",
    "wait": "waiting",
    "queued": "queued_tokens",
    "kv": "kv_usage",
    "cached": "cached_tokens",
    "restarts": "restarts",
}
"""Headings short enough for 80 columns, and the fields of /admin/status below them."""
_TIMES = {"ttft p50": "ttft_p50_s", "ttft p90": "ttft_p90_s", "tpot p50": "tpot_p50_s", "tpot p90": "tpot_p90_s"}
_PIPE_WIDTH = 200


def print_status(answer: Mapping[str, Any]) -> None:
    """Print one row per worker of a /admin/status answer.

    Below the table come the arithmetics, which are too long for a column, and why workers are not ready or were restarted.
    """
    console = table_console()
    table = Table(*_COLUMNS, box=None, pad_edge=False, padding=(0, 1))
    for worker in answer["workers"]:
        table.add_row(*(_cell(name, worker.get(name)) for name in _COLUMNS.values()))
    console.print(table)
    for line in _arithmetics(answer["workers"]):
        console.print(line, markup=False, soft_wrap=True)
    for line in (*_tiers(answer["workers"]), *_guesses(answer["workers"])):
        console.print(line, markup=False, soft_wrap=True)
    for worker in answer["workers"]:
        if worker.get("last_error"):
            console.print(f"{worker['worker_id']}: {worker['last_error']}{_backoff(worker)}", markup=False, soft_wrap=True)
        if worker.get("link_error"):
            console.print(f"{worker['worker_id']}: no link: {worker['link_error']}", markup=False, soft_wrap=True)
    for line in rollout_lines(answer.get("rollout")):
        console.print(line, markup=False, soft_wrap=True)
    for line in autoscaler_lines(answer.get("autoscaler")):
        console.print(line, markup=False, soft_wrap=True)
    if (routers := answer.get("routers")) is not None:
        console.print(_routers(routers))
    for line in _key_problems(answer.get("api_keys") or {}):
        console.print(line, markup=False, soft_wrap=True)


def _arithmetics(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which workers compute by which arithmetic, a line for each."""
    known = [worker for worker in workers if worker["arithmetic"]]
    names = dict.fromkeys(worker["arithmetic"] for worker in known)
    return [f"{name}: {', '.join(each['worker_id'] for each in known if each['arithmetic'] == name)}" for name in names]


def _tiers(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """What lies in each tier of each node, a line for each."""
    found = {(worker["node"], name): tier for worker in workers for name, tier in (worker.get("tiers") or {}).items()}
    return [
        f"{name} tier of {node}: {tier['tokens']} tokens, {tier['bytes'] / 1e9:.2f} GB" for (node, name), tier in found.items()
    ]


def _guesses(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many tokens each worker has guessed, a line for each that has guessed any."""
    return [
        f"{worker['worker_id']}: {worker['accepted_tokens']} of {worker['draft_tokens']} guessed tokens were right"
        for worker in workers
        if worker.get("draft_tokens")
    ]


def autoscaler_lines(state: Mapping[str, Any] | None) -> list[str]:
    """Return what the autoscaler of /admin/status does, what is wrong with it, and its latest decision; nothing without one."""
    if state is None:
        return []
    lines = [f"autoscaler: {'paused, ' + state['paused'] if state['paused'] else 'running'}"]
    if state["problem"]:
        lines.append(f"autoscaler: {state['problem']}")
    return lines + [f"latest: {each['reason']}" for each in state["decisions"][:1]]


def rollout_lines(state: Mapping[str, Any] | None) -> list[str]:
    """Return how the latest rollout of /admin/status goes or has ended, and how both kinds of workers do."""
    if state is None:
        return []
    phase = state["phase"].replace("_", " ")
    share = f", {state['share']:.0%} of new requests" if state["share"] else ""
    what = ", ".join(state["changes"])
    lines = [f"rollout of revision {state['revision']} ({what}): {phase}{share}; {state['reason'] or state['verdict']}"]
    for name, each in sorted(state["figures"].items()):
        times = (f"{label} {each[key] * 1e3:.0f} ms" for label, key in _TIMES.items() if each[key] is not None)
        counts = [f"{each['requests']} requests", f"{each['failures']} failed"]
        lines.append(f"{name} workers: {', '.join([*counts, *times])}")
    return lines


def _routers(routers: Mapping[str, Any]) -> str:
    """How many serve, and how many should if that is another number."""
    wanted, ready = routers["wanted"], routers["ready"]
    return f"routers: {ready}" + (f" of {wanted} wanted" if wanted not in (None, ready) else "")


def _key_problems(keys: Mapping[str, Any]) -> list[str]:
    """What operators have to mend in the file of API keys, a line each."""
    lines = [f"API key {key_id} is refused: {problem}" for key_id, problem in sorted(keys.get("skipped", {}).items())]
    if keys.get("problem"):
        lines.append(f"API keys stay as they were: {keys['problem']}")
    return lines


def print_models(models: Sequence[ListedModel]) -> None:
    """Print one row per model. A model that is not in the cache is fetched when it is first served."""
    table = Table("name", "source", "size", "cached at", box=None, pad_edge=False)
    for model in models:
        table.add_row(model.name, model.source, f"{model.num_bytes / 1e6:.0f} MB", str(model.path or "-"))
    table_console().print(table)


def print_usage(sums: UsageSums) -> None:
    """Print one row per tenant, key and model, the sum of all, and from when on the log tells."""
    table = Table("tenant", "key", "model", box=None, pad_edge=False)
    for title in ("requests", "prompt", "cached", "answer", "tokens"):
        table.add_column(title, justify="right")
    for (tenant, key, model), row in sums.sorted_rows():
        table.add_row(*(escape(name or "-") for name in (tenant, key, model)), *_numbers(row))
    if len(sums.rows) != 1:
        table.add_row("all", "", "", *_numbers(sums.total()))
    console = table_console()
    console.print(table)
    console.print("the log is empty" if sums.since is None else f"the log begins at {sums.since}", markup=False)


def _numbers(row: UsageSum) -> list[str]:
    return [str(n) for n in (row.requests, row.prompt_tokens, row.cached_tokens, row.answer_tokens, row.tokens)]


def table_console() -> Console:
    """Return a console for tables: whoever reads a pipe wants whole lines."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def _backoff(worker: Mapping[str, Any]) -> str:
    """What keeps a worker from starting at once, or an empty text."""
    if worker["state"] != "starting" or worker["quick_ends"] < 2:
        return ""
    return f" (it ended soon {worker['quick_ends']} times in a row, and waits {worker['start_delay_s']:g} s before it starts)"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}" if name in ("busy", "kv_usage") else str(value)

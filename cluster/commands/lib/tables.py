"""Tables for `tandem status`, `tandem models` and `tandem usage`, and the console for those of `tandem keys`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
"""Short headings, and the fields of /admin/status below them."""
_SPARE = ("pid", "epoch", "cached", "restarts", "queued", "node", "kv", "wait", "busy")
"""Columns of the status that a narrow terminal does without, the first of them first."""
_TIMES = {"ttft p50": "ttft_p50_s", "ttft p90": "ttft_p90_s", "tpot p50": "tpot_p50_s", "tpot p90": "tpot_p90_s"}
_PIPE_WIDTH = 200
_GAP = 2
_FOLDED = 6
"""Least width of a column whose cells may be folded."""


@dataclass(frozen=True)
class Grid:
    """A table of which no cell is cut: they are names and numbers to be copied."""

    columns: Mapping[str, Sequence[str]]
    """The cells of each column, by its title."""
    numbers: Collection[str] = ()
    """Columns that are aligned to the right."""
    folded: Collection[str] = ()
    """Columns whose cells may take several lines where the terminal is narrow."""
    spare: Sequence[str] = ()
    """Columns that a narrow terminal does without, the first of them first."""

    def print(self, console: Console) -> None:
        """Print it as wide as it has to be. Below it a line names the columns that are left out."""
        titles = list(self.columns)
        room = console.width if console.is_terminal else self._least_width(titles)
        left_out = []
        for title in self.spare:
            if self._least_width(titles) <= room:
                break
            titles.remove(title)
            left_out.append(title)
        least = self._least_width(titles)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP // 2), width=least if least > console.width else None)
        for title in titles:
            table.add_column(title, no_wrap=title not in self.folded, overflow="fold")
            table.columns[-1].justify = "right" if title in self.numbers else "left"
        for row in zip(*(self.columns[title] for title in titles), strict=True):
            table.add_row(*map(Text, row))
        console.print(table, crop=False)
        if left_out:
            console.print(f"too narrow for {', '.join(left_out)}: --json has all", style="dim", soft_wrap=True)

    def _least_width(self, titles: Sequence[str]) -> int:
        return sum(map(self._least_width_of, titles)) + _GAP * (len(titles) - 1)

    def _least_width_of(self, title: str) -> int:
        longest = max(map(cell_len, self.columns[title]), default=0)
        return max(cell_len(title), min(longest, _FOLDED) if title in self.folded else longest)


def print_status(answer: Mapping[str, Any]) -> None:
    """Print one row per worker of a /admin/status answer.

    Below the table come the arithmetics, which are too long for a column, and why workers are not ready or were restarted.
    """
    console = table_console()
    rows = answer["workers"]
    Grid({title: [_cell(name, row.get(name)) for row in rows] for title, name in _COLUMNS.items()}, spare=_SPARE).print(console)
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
    columns = {
        "name": [model.name for model in models],
        "source": [model.source for model in models],
        "size": [f"{model.num_bytes / 1e6:.0f} MB" for model in models],
        "cached at": [str(model.path or "-") for model in models],
    }
    Grid(columns, folded=("source", "cached at")).print(table_console())


def print_usage(sums: UsageSums) -> None:
    """Print one row per tenant, key and model, the sum of all, and from when on the log tells."""
    titles = ("requests", "prompt", "cached", "answer", "tokens")
    rows = [[*(name or "-" for name in names), *_numbers(row)] for names, row in sums.sorted_rows()]
    if len(rows) != 1:
        rows.append(["all", "", "", *_numbers(sums.total())])
    columns = {title: [row[i] for row in rows] for i, title in enumerate(("tenant", "key", "model", *titles))}
    console = table_console()
    Grid(columns, numbers=titles, folded=("tenant", "model"), spare=("cached", "answer", "prompt", "requests")).print(console)
    console.print("the log is empty" if sums.since is None else f"the log begins at {sums.since}", markup=False)


def _numbers(row: UsageSum) -> list[str]:
    return [str(n) for n in (row.requests, row.prompt_tokens, row.cached_tokens, row.answer_tokens, row.tokens)]


def table_console() -> Console:
    """Return a console for tables. Whoever reads a pipe wants whole lines, and nobody wants an emoji where a text has `:x:`."""
    console = Console(highlight=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, emoji=False, width=_PIPE_WIDTH)


def _backoff(worker: Mapping[str, Any]) -> str:
    """What keeps a worker from starting at once, or an empty text."""
    if worker["state"] != "starting" or worker["quick_ends"] < 2:
        return ""
    return f" (it ended soon {worker['quick_ends']} times in a row, and waits {worker['start_delay_s']:g} s before it starts)"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}" if name in ("busy", "kv_usage") else str(value)

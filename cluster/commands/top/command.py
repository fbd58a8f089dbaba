"""The command `tandem top`: asks a cluster once a second, and draws what the answers say until Ctrl-C.

first answer ──► drawn ── interval ──► the next answer ──► drawn, and so on
   └─ none: an error, as of other commands    └─ none: the last one stays, with the reason
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, AdminKey, Url
from cluster.commands.top.figures import Poll, Polls
from cluster.commands.top.screen import draw
from protocol.errors import ConfigError, UnavailableError

_PIPE_WIDTH = 200
_LONGEST_S = 86_400.0


def top(
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=_LONGEST_S, help="Seconds from one look to the next.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print what two looks tell, and end.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    metrics_key: Annotated[
        str | None,
        typer.Option(
            "--metrics-key", envvar="TANDEM_METRICS_KEY", help="Key for /metrics, where /admin needs none.", show_envvar=True
        ),
    ] = None,
) -> None:
    """Watch the workers: state, load, how busy they are, and where requests' time goes."""
    console = Console(highlight=False)
    client = ApiClient(url, admin_key or metrics_key)
    if once:
        show_once(client, console, interval_s)
    elif console.is_terminal:
        watch(client, console, interval_s)
    else:
        raise ConfigError("`tandem top` draws on a terminal; `tandem top --once` prints to anything")


def show_once(client: ApiClient, console: Console, interval_s: float) -> None:
    """Print what two looks at the cluster tell. Raises TandemError if it does not answer."""
    polls = Polls(interval_s)
    polls.add(look(client))
    time.sleep(interval_s)
    polls.add(look(client))
    console.print(draw(polls, None, None), width=None if console.is_terminal else _PIPE_WIDTH)


def watch(client: ApiClient, console: Console, interval_s: float) -> None:
    """Draw until Ctrl-C. Raises TandemError if the cluster does not answer at first, or refuses to."""
    polls = Polls(interval_s)
    polls.add(look(client))
    problem: str | None = None
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            began = time.monotonic()
            live.update(draw(polls, (console.width, console.height), problem), refresh=True)
            time.sleep(max(0.0, interval_s - (time.monotonic() - began)))
            problem = _next(client, polls)


def _next(client: ApiClient, polls: Polls) -> str | None:
    """Take the next look; returns why there is none."""
    try:
        polls.add(look(client))
    except UnavailableError as error:
        age_s = 0.0 if polls.latest is None else time.monotonic() - polls.latest.at_s
        return f"figures are {age_s:.0f} s old: {error.message}"
    return None


def look(client: ApiClient) -> Poll:
    """Ask the cluster for its state and its metrics. Raises TandemError for a refusal, UnavailableError without an answer."""
    status, at_s = client.get("/admin/status"), time.monotonic()
    return Poll.of(at_s, status, client.get_text("/metrics"))

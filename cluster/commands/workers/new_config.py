"""`tandem rollout --config`: has a cluster try another configuration for its workers, and shows how that goes.

The controller does it (`cluster.rollout.driver`). This only asks and looks on: it goes on when the command is interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from cluster.commands.lib.http_client import ApiClient, json_of
from cluster.commands.lib.tables import rollout_lines
from cluster.commands.lib.waiting import Status, wait_for
from configs.loader import read_values
from protocol.errors import ConfigError, InvalidRequestError, UnavailableError

_LONGEST_S = 7 * 86_400.0
"""Seconds for which the command looks on. A cluster without requests has no verdict."""
_UNHEARD_S = 60.0
"""Seconds for which routers may not have heard of a rollout. A cluster that was restarted never does."""


def parse_share(text: str) -> float:
    """`10%` or `0.1` as a number. Raises InvalidRequestError for what is no share above 0 and up to a half."""
    number = text.removesuffix("%")
    try:
        share = float(number) / (100.0 if number != text else 1.0)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 0.5:
        raise InvalidRequestError(f"{text}: write a share such as 10%, above 0 and up to 50%", param="canary")
    return share


def try_config(client: ApiClient, path: Path, canary: float, watch_s: float, min_requests: int) -> None:
    """Have the cluster roll out the keys of a file, and look on until it is done.

    Raises ConfigError if the file can't be sent, InvalidRequestError if it can't be rolled out, UnavailableError if it was
    rolled back.
    """
    config = read_values(path)
    try:
        json_of(config)
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: {error.message}", param="config") from None
    body = {"action": "start", "config": config, "canary": canary, "watch_s": watch_s, "min_requests": min_requests}
    revision = client.post("/admin/rollout", body)["revision"]
    console = Console(stderr=True)
    with console.status("rolling out") as progress:
        state = _end_of(client, revision, lambda text: progress.update(Text(text)))
    if state["phase"] != "done":
        raise UnavailableError(f"rolled back: {state['reason']}")
    for line in rollout_lines(state):
        console.print(line, markup=False, highlight=False, emoji=False)


def abort(client: ApiClient) -> None:
    """Have the cluster roll back, and look on until it is done.

    Raises InvalidRequestError if nothing is rolled out, or nothing is left to go back to; UnavailableError if it came too late.
    """
    revision = client.post("/admin/rollout", {"action": "abort"})["revision"]
    if _end_of(client, revision)["phase"] != "rolled_back":
        raise UnavailableError("too late: the workers have the new configuration")
    Console(stderr=True).print("the workers have their former configuration", highlight=False)


def _end_of(client: ApiClient, revision: int, on_look: Callable[[str], None] | None = None) -> Mapping[str, Any]:
    """Wait for the end of the rollout of this revision, and return how it ended.

    Routers hear of it one after the other, so what was seen once counts. Raises UnavailableError if another one has begun, or
    if no router has heard of it for a minute.
    """
    seen: list[Mapping[str, Any]] = []
    unheard_since: float | None = None

    def lacking(status: Status) -> str | None:
        nonlocal unheard_since
        state = status["rollout"]
        if state is None or state["revision"] < revision:
            now = time.monotonic()
            unheard_since = now if unheard_since is None else unheard_since
            if now - unheard_since > _UNHEARD_S:
                raise UnavailableError(f"the cluster knows nothing of revision {revision}: it was restarted")
            return "it begins"  # this router has not heard of it yet
        unheard_since = None
        if state["revision"] > revision:
            raise UnavailableError(f"revision {revision} is over, and another one is rolled out: see `tandem status`")
        if state["phase"] not in ("done", "rolled_back"):
            return rollout_lines(state)[0]
        seen.append(state)
        return None

    wait_for(client, lacking, _LONGEST_S, on_look)
    return seen[-1]

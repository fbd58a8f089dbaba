"""`tandem scale`: reads sizes such as `prefill=2` or `routers=3`, and waits until the cluster has them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, LONGEST_S, AdminKey, Url
from cluster.commands.lib.waiting import Lacking, Status, of_role, wait_for
from protocol.errors import InvalidRequestError, UnavailableError
from protocol.messages.workers import Role

_ROUTERS = "routers"
_NAMES = (*(role.value for role in Role), _ROUTERS)
_MOST_DIGITS = 9
_HEARD_S = 3.0
"""Seconds in which every router that answers has heard of the latest sizes."""


def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="NAME=NUMBER...", help="For example: prefill=2 decode=3 routers=2")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0.0, max=LONGEST_S, help="Seconds to wait until it is done; 0 returns at once.")
    ] = 600.0,
) -> None:
    """Change how many workers and routers there are while requests run.

    Running streams move to the workers that stay. A router that goes waits for its streams first, `limits.shutdown_s` at most.
    """
    wanted = parse_sizes(sizes)
    client = ApiClient(url, admin_key)
    client.post("/admin/scale", wanted)
    if wait_s > 0:
        wait_until_scaled(client, wanted, wait_s)


def parse_sizes(arguments: Sequence[str]) -> dict[str, int]:
    """`["prefill=2", "routers=3"]` as a mapping. Raises InvalidRequestError naming the argument that can't be read."""
    sizes: dict[str, int] = {}
    for argument in arguments:
        name, _, number = argument.partition("=")
        if name not in _NAMES or not number.removeprefix("-").isdecimal() or len(number) > _MOST_DIGITS:
            problem = f"{argument:.60}: write prefill=N, decode=N or routers=N with a whole number N"
            raise InvalidRequestError(problem, param=f"{name:.60}")
        if name in sizes:
            raise InvalidRequestError(f"{name} is given twice", param=name)
        sizes[name] = int(number)
    return sizes


def pending(status: Status, wanted: Mapping[str, int]) -> str | None:
    """What is not as wanted yet in an answer of /admin/status, in words for people; None when all is."""
    parts = []
    for name, number in wanted.items():
        if name == _ROUTERS:
            ready = status["routers"]["ready"]
            if ready != number:
                parts.append(f"{ready} routers of {number} wanted")
            continue
        states = [worker["state"] for worker in of_role(status["workers"], Role(name))]
        if states != ["ready"] * number:
            counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
            parts.append(f"{name} {counts} of {number} wanted")
    return "; ".join(parts) or None


def what_a_scale_lacks(wanted: Mapping[str, int]) -> Lacking:
    """What a cluster lacks of these workers and routers. Raises UnavailableError once it shows that others are wanted."""
    wanted_at = math.inf

    def lacking(status: Status) -> str | None:
        nonlocal wanted_at
        by_now = status["wanted"] | {_ROUTERS: status["routers"]["wanted"]}
        others = [name for name, number in wanted.items() if by_now.get(name) != number]
        if not others:
            wanted_at = time.monotonic()
        elif time.monotonic() - wanted_at > _HEARD_S:
            changes = ", ".join(f"{name}={by_now.get(name)} and no longer {name}={wanted[name]}" for name in others)
            raise UnavailableError(f"others have changed what is wanted: {changes}")
        return pending(status, wanted)

    return lacking


def wait_until_scaled(client: ApiClient, wanted: Mapping[str, int], deadline_s: float) -> None:
    """Show progress until the cluster has just these workers and routers, all ready.

    Raises UnavailableError if it takes longer than `deadline_s` seconds, or when other sizes are wanted meanwhile.
    """
    console = Console(stderr=True)
    with console.status("scaling") as progress:
        wait_for(client, what_a_scale_lacks(wanted), deadline_s, lambda left: progress.update(Text(f"scaling: {left}")))
    console.print(", ".join(f"{number} {name}" for name, number in wanted.items()), highlight=False)

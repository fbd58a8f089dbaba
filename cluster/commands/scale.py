"""`tandem scale`: reads sizes such as `prefill=2`, and waits until the cluster has them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from cluster.commands.http_client import ApiClient
from protocol.errors import InvalidRequestError, UnavailableError
from protocol.messages import Role

_ASK_AGAIN_S = 0.5


def parse_sizes(arguments: Sequence[str]) -> dict[Role, int]:
    """`["prefill=2", "decode=3"]` as a mapping. Raises InvalidRequestError naming the argument that can't be read."""
    sizes: dict[Role, int] = {}
    for argument in arguments:
        name, _, number = argument.partition("=")
        if name not in {role.value for role in Role} or not number.removeprefix("-").isdecimal():
            raise InvalidRequestError(f"{argument}: write prefill=N or decode=N with a whole number N", param=name)
        if Role(name) in sizes:
            raise InvalidRequestError(f"{name} is given twice", param=name)
        sizes[Role(name)] = int(number)
    return sizes


def pending(workers: Sequence[Mapping[str, Any]], wanted: Mapping[Role, int]) -> str | None:
    """What is not as wanted yet in a /admin/status answer, for people; None when it is done."""
    parts = []
    for role, number in wanted.items():
        states = [worker["state"] for worker in workers if worker["role"] == role.value]
        if states != ["ready"] * number:
            counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
            parts.append(f"{role.value} {counts} of {number} wanted")
    return "; ".join(parts) or None


def wait_until_scaled(client: ApiClient, wanted: Mapping[Role, int], deadline_s: float) -> None:
    """Show progress until the cluster has just these workers, all ready. Raises UnavailableError at the deadline."""
    end = time.monotonic() + deadline_s
    console = Console(stderr=True)
    with console.status("scaling") as progress:
        while (left := pending(client.get("/admin/status")["workers"], wanted)) is not None:
            if time.monotonic() > end:
                raise UnavailableError(f"not done after {deadline_s:g} s: {left}")
            progress.update(f"scaling: {left}")
            time.sleep(_ASK_AGAIN_S)
    console.print(", ".join(f"{number} {role.value}" for role, number in wanted.items()), highlight=False)

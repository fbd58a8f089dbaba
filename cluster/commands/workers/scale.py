"""`tandem scale`: reads sizes such as `prefill=2`, and waits until the cluster has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, AdminKey, Url
from cluster.commands.lib.waiting import Workers, wait_for
from protocol.errors import InvalidRequestError
from protocol.messages import Role


def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="ROLE=WORKERS...", help="For example: prefill=2 decode=3")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait until it is done; 0 returns at once.")] = 600.0,
) -> None:
    """Change the number of workers while requests run; running streams move to the workers that stay."""
    wanted = parse_sizes(sizes)
    client = ApiClient(url, admin_key)
    client.post("/admin/scale", {role.value: workers for role, workers in wanted.items()})
    if wait_s > 0:
        wait_until_scaled(client, wanted, wait_s)


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


def pending(workers: Workers, wanted: Mapping[Role, int]) -> str | None:
    """What is not as wanted yet among the workers of a /admin/status answer, in words for people; None when all is."""
    parts = []
    for role, number in wanted.items():
        states = [worker["state"] for worker in workers if worker["role"] == role.value and worker["state"] != "standby"]
        if states != ["ready"] * number:
            counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
            parts.append(f"{role.value} {counts} of {number} wanted")
    return "; ".join(parts) or None


def wait_until_scaled(client: ApiClient, wanted: Mapping[Role, int], deadline_s: float) -> None:
    """Show progress until the cluster has just these workers, all ready.

    Raises UnavailableError if it takes longer than `deadline_s` seconds.
    """
    console = Console(stderr=True)
    with console.status("scaling") as progress:
        wait_for(client, lambda workers: pending(workers, wanted), deadline_s, lambda left: progress.update(f"scaling: {left}"))
    console.print(", ".join(f"{number} {role.value}" for role, number in wanted.items()), highlight=False)

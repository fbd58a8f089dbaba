"""`tandem leave`: has everything move off a node that will go, and waits until it is empty.

Runs on the node itself, or anywhere in its Ray cluster. It asks Ray to drain the node, which is all that the controller wants
to know, and looks into Ray's books until no worker and no router is there. It does not join the Ray cluster: that would end it
with the node.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from protocol.errors import UnavailableError

if TYPE_CHECKING:
    from cluster.nodes.gcs import Gcs, RayNode

_LOOK_S = 0.5
_LONGEST_S = 86_400.0


def leave(
    node: Annotated[
        str | None,
        typer.Argument(help="Its id in Ray (or the beginning), its address, or its host's name; without it, this machine."),
    ] = None,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=1.0, max=_LONGEST_S, help="Seconds until the node is gone.")
    ] = 600.0,
    reason: Annotated[str, typer.Option("--reason", help="Why it goes, in words for Ray's log.")] = "maintenance",
    address: Annotated[
        str, typer.Option("--address", envvar="RAY_ADDRESS", help="Its Ray cluster: host:port, or auto on one of its nodes.")
    ] = "auto",
) -> None:
    """Move all workers and routers off a node that will go, and wait for it: exit code 0 if it is empty in time, else 1.

    Nothing is placed there any more, whether the wait is interrupted or not.
    """
    from cluster.ray.session import client_environment

    client_environment()
    from cluster.nodes.gcs import chosen_node, find_gcs

    gcs = find_gcs(address)
    leaving = chosen_node(gcs.nodes(), node)
    deadline = time.monotonic() + deadline_s
    gcs.drain(leaving.node_id, f"tandem leave: {reason}", deadline_s)
    problem = wait_until_empty(gcs, leaving, deadline)
    what = f"node {leaving.node_id[:8]} ({leaving.address})"
    typer.echo(f"{what} {problem or 'is empty'}", err=True)
    if problem is not None:
        raise typer.Exit(1)


def wait_until_empty(gcs: Gcs, node: RayNode, deadline: float) -> str | None:
    """Show what is on a node until nothing is, or until `deadline` (`time.monotonic`).

    Return None when it is empty, else what is wrong, in words for people. While the GCS is away, what it said last counts.
    """
    there: list[str] = []
    with Console(stderr=True).status(f"leaving {node.address}") as progress:
        while True:
            try:
                present = next((each for each in gcs.nodes() if each.node_id == node.node_id), None)
                if present is None or not present.up:  # Ray ends on a node that it drains when nothing is left there
                    return "ended before it was empty" if present is not None and present.lost and there else None
                there = gcs.present_on(node.node_id)
                if not there:
                    return None
                said = f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} there"
            except UnavailableError as failure:
                said = failure.message
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return f"is not empty at its deadline: {said}"
            progress.update(Text(f"leaving {node.address}: {said}, {left_s:.0f} s left"))
            time.sleep(min(_LOOK_S, left_s))

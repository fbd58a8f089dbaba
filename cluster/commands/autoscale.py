"""`tandem autoscale`: pauses the autoscaler and has it go on, and shows what it has decided."""

from __future__ import annotations

import time

import typer
from rich.console import Console

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, AdminKey, Url
from protocol.errors import InvalidRequestError

autoscale = typer.Typer(
    name="autoscale", help="Pause the autoscaler, or have it go on.", no_args_is_help=True, add_completion=False
)


@autoscale.command()
def resume(url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Have the pools size themselves again, after an operator has scaled, flipped or drained, or has paused it."""
    ApiClient(url, admin_key).post("/admin/autoscale", {"action": "resume"})
    typer.echo("the pools size themselves")


@autoscale.command()
def pause(url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Leave all sizes as they are. A role that sleeps is still woken by a request."""
    ApiClient(url, admin_key).post("/admin/autoscale", {"action": "pause"})
    typer.echo("the pools keep their sizes")


@autoscale.command()
def show(url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Show what was decided lately and why, the newest first."""
    state = ApiClient(url, admin_key).get("/admin/status").get("autoscaler")
    if state is None:
        raise InvalidRequestError("this cluster does not size itself: it was started without --autoscale", param="autoscale")
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print("paused: " + state["paused"] if state["paused"] else "running")
    if state["problem"]:
        console.print(state["problem"])
    for each in state["decisions"]:
        console.print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(each['at']))}  {each['reason']}")

"""`tandem cache`: what a cluster keeps of earlier prompts and answers."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, AdminKey, Url

_ERASE_S = 75.0
"""Seconds for the answer: a router gives workers a minute to erase what they have."""

cache = typer.Typer(name="cache", help="Erase cached KV.", no_args_is_help=True, add_completion=False)


@cache.callback()
def _cache() -> None:
    """A group, though it has one command so far."""


@cache.command()
def reset(
    tenant: Annotated[str | None, typer.Option(help="Whose; otherwise everybody's.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Erase cached KV from the workers' pools, and from the memory and disk tiers of their nodes.

    Pools forget everything, and tiers what is the tenant's. What requests that run are using is cached as they go on and end:
    stop the tenant's first.
    """
    body = {"action": "reset", "tenant": tenant}
    workers = ApiClient(url, admin_key).post("/admin/cache", body, _ERASE_S)["workers"]
    pools = sum(worker["pool_blocks"] for worker in workers)
    tiers = sum(worker["tier_blocks"] for worker in workers)
    typer.echo(f"erased {pools} blocks of pools and {tiers} of tiers, at {len(workers)} workers")

"""`tandem audit`: asks all workers for what they own, and prints what nobody answers for."""

from __future__ import annotations

import json

import typer

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, AdminKey, AsJson, Url


def audit(as_json: AsJson = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Compare the books of all workers: nothing, or a line for each leak and exit code 1."""
    answer = ApiClient(url, admin_key).get("/admin/audit")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        for leak in answer["leaks"]:
            typer.echo(leak["message"])
    if answer["leaks"]:
        raise typer.Exit(1)

"""`tandem status`: one row for each worker."""

from __future__ import annotations

import json

import typer

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, AdminKey, AsJson, Url
from cluster.commands.lib.tables import print_status


def status(as_json: AsJson = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Show the workers: state, load, KV cache."""
    answer = ApiClient(url, admin_key).get("/admin/status")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        print_status(answer)

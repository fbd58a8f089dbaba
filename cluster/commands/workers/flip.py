"""`tandem flip`: gives one worker another role."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, AdminKey, Url
from cluster.commands.lib.waiting import current_workers
from protocol.errors import InvalidRequestError
from protocol.messages import Role

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def flip(
    worker: Annotated[str, typer.Argument(help="Its id, as `tandem status` shows it.")],
    to: Annotated[Role | None, typer.Option("--to", help="The role that it is to have; without it, the other one.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Give a worker another role at once: same process, KV pool and cache. Its streams move while they run."""
    client = ApiClient(url, admin_key)
    roles = {each["worker_id"]: Role(each["role"]) for each in current_workers(client)}
    if worker not in roles:
        raise InvalidRequestError(f"there is no worker {worker!r:.100}; `tandem status` lists them", param="worker")
    role = to or _OTHER[roles[worker]]
    if role is roles[worker]:
        raise InvalidRequestError(f"{worker} is a {role.value} worker already", param="to")
    client.post("/admin/flip", {"worker_id": worker, "role": role.value})
    Console(stderr=True).print(f"{worker} is a {role.value} worker now", highlight=False)

"""`tandem flip`: gives one worker another role."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, AdminKey, Url
from cluster.commands.lib.waiting import current_workers
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Duty

_OTHER = {Duty.PREFILL: Duty.DECODE, Duty.DECODE: Duty.PREFILL}


def flip(
    worker: Annotated[str, typer.Argument(help="Its id, as `tandem status` shows it.")],
    to: Annotated[
        Duty | None, typer.Option("--to", help="The role that it is to have, or both; without it, the other role.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Give a worker another role, or both, at once: same process, KV pool and cache.

    Streams move while they run, if the worker decodes no more.
    """
    client = ApiClient(url, admin_key)
    duties = {each["worker_id"]: Duty(each["role"]) for each in current_workers(client)}
    if worker not in duties:
        raise InvalidRequestError(f"there is no worker {worker!r:.100}; `tandem status` lists them", param="worker")
    duty = to or _OTHER.get(duties[worker])
    if duty is None:
        raise InvalidRequestError(f"{worker} does both: say which role it is to have", param="to")
    if duty is duties[worker]:
        raise InvalidRequestError(f"{worker} is {duty.in_words} already", param="to")
    client.post("/admin/flip", {"worker_id": worker, "role": duty.value})
    Console(stderr=True).print(f"{worker} is {duty.in_words} now", highlight=False)

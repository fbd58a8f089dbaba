"""`tandem drain`: asks a cluster to empty one worker, and waits until that is done."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, LONGEST_S, AdminKey, Url
from cluster.commands.lib.waiting import (
    Lacking,
    Status,
    current_workers,
    find_worker,
    wait_for,
    what_a_drain_lacks,
    what_a_restart_lacks,
)
from protocol.errors import UnavailableError


def drain(
    worker: Annotated[str, typer.Argument(help="Its id, as `tandem status` shows it.")],
    restart: Annotated[bool, typer.Option("--restart", help="Start it anew instead of having one worker less.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0.0, max=LONGEST_S, help="Seconds to wait until it is done; 0 returns at once.")
    ] = 660.0,
) -> None:
    """Empty a worker while requests run, and end it: running streams move to other workers."""
    drain_and_wait(ApiClient(url, admin_key), worker, restart, wait_s)


def drain_and_wait(client: ApiClient, worker_id: str, restart: bool, wait_s: float) -> None:
    """Drain a worker and, unless `wait_s` is 0, wait until it is gone or, with `restart`, ready again.

    Raises InvalidRequestError if the worker can't be drained, UnavailableError if it takes longer than `wait_s` seconds, or if
    one that is restarted goes for good instead.
    """
    worker = find_worker(current_workers(client), worker_id)
    client.post("/admin/drain", {"worker": worker_id, "restart": restart})
    if restart and worker is not None:
        lacking = _or_gone_for_good(worker_id, what_a_restart_lacks(worker))
    else:
        lacking = what_a_drain_lacks(worker_id, None if worker is None else worker["epoch"], restart)
    if wait_s > 0:
        console = Console(stderr=True)
        with console.status(f"draining {worker_id}"):
            wait_for(client, lacking, wait_s)
        console.print(f"{worker_id} {'was restarted' if restart else 'is gone'}", highlight=False)


def _or_gone_for_good(worker_id: str, lacking: Lacking) -> Lacking:
    """What a worker that is restarted lacks until it is ready. Raises UnavailableError if it is taken for good meanwhile."""

    def checked(status: Status) -> str | None:
        what, worker = lacking(status), find_worker(status["workers"], worker_id)
        if what is not None and (worker is None or worker.get("leaves_at") is not None):
            raise UnavailableError(f"{worker_id} will not start again: it was scaled away, or its node leaves")
        return what

    return checked

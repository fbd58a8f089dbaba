"""`tandem rollout`: restarts all workers of a cluster, one after the other, or has them take another configuration.

    one worker more, if there is room ──► for each of the old ones: drained, restarted, ready again ──► the extra one drained

That is done for one role, then for the other. Workers on standby are restarted at the end. An autoscaler keeps quiet meanwhile.
With `--config`, the controller does all of it (`cluster.commands.workers.new_config`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, AdminKey, Url
from cluster.commands.lib.waiting import (
    Workers,
    current_workers,
    epoch_of,
    of_role,
    wait_for,
    what_a_drain_lacks,
    what_a_role_lacks,
)
from cluster.commands.workers.new_config import abort, parse_share, try_config
from protocol.errors import InvalidRequestError, UnavailableError
from protocol.messages import Role

Report = Callable[[str], None]
"""A function that is told what is being done, in words for people."""


def rollout(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    room_s: Annotated[
        float, typer.Option("--room", help="Seconds to wait for one worker more of each role; 0 does without.")
    ] = 120.0,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds that one worker may take to drain and to start.")] = 780.0,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with what changes for workers: tried on some requests, then taken by all.")
    ] = None,
    canary: Annotated[str, typer.Option(help="With --config: the share of new requests that try it.")] = "10%",
    watch_s: Annotated[float, typer.Option("--watch", help="With --config: seconds to compare it at least.")] = 300.0,
    min_requests: Annotated[int, typer.Option(help="With --config: requests to compare at least, of either kind.")] = 20,
    give_up: Annotated[bool, typer.Option("--abort", help="End the rollout of a configuration that is under way.")] = False,
) -> None:
    """Restart all workers, one after the other, while requests run, or give them another configuration (--config).

    A configuration that is worse on its share of the requests is rolled back by itself.
    """
    client = ApiClient(url, admin_key)
    if give_up:
        abort(client)
    elif config is not None:
        try_config(client, config, parse_share(canary), watch_s, min_requests)
    else:
        roll_out(client, room_s, wait_s)


def roll_out(client: ApiClient, room_s: float, wait_s: float) -> None:
    """Restart every worker that is there now. Raises UnavailableError if one takes longer than `wait_s` seconds.

    For each role it waits at most `room_s` seconds for an additional worker; 0 means that it asks for none.
    """
    status = client.get("/admin/status")
    now: Workers = status["workers"]
    old = {role: [worker for worker in of_role(now, role) if worker["state"] != "draining"] for role in Role}
    waiting = [worker for worker in now if worker.get("standby")]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, _autoscaler_quiet(client, status.get("autoscaler")):
        bar = progress.add_task("rollout", total=sum(map(len, old.values())) + len(waiting))

        def report(text: str) -> None:
            progress.update(bar, description=text)

        for role, workers in old.items():
            with _one_more(client, role, len(workers), room_s, wait_s, report) if workers else nullcontext():
                _restart_each(client, workers, wait_s, report, lambda: progress.advance(bar))
        _restart_each(client, waiting, wait_s, report, lambda: progress.advance(bar))
        report("all workers are new")


@contextmanager
def _autoscaler_quiet(client: ApiClient, state: Mapping[str, Any] | None) -> Iterator[None]:
    """While the block runs, the autoscaler, whose state is that of /admin/status, changes nothing."""
    runs = state is not None and not state["paused"]
    if runs:
        client.post("/admin/autoscale", {"action": "pause"})
    try:
        yield
    finally:
        if runs:
            client.post("/admin/autoscale", {"action": "resume"})


def _restart_each(client: ApiClient, workers: Workers, wait_s: float, report: Report, on_restarted: Callable[[], None]) -> None:
    """Restart these workers in turn. Raises UnavailableError if one takes longer than `wait_s` seconds."""
    for worker in workers:
        worker_id, epoch = worker["worker_id"], worker["epoch"]
        report(f"restarting {worker_id}")
        present = epoch_of(current_workers(client), worker_id)
        if present == epoch:  # else it has died meanwhile, and is new, or has gone in the extra one's place
            client.post("/admin/drain", {"worker": worker_id, "restart": True})
        if present is not None:
            wait_for(client, what_a_drain_lacks(worker_id, epoch, restart=True), wait_s)
        on_restarted()


@contextmanager
def _one_more(client: ApiClient, role: Role, number: int, room_s: float, wait_s: float, report: Report) -> Iterator[None]:
    """While the block runs, the role has one worker more than `number`, which takes what the others do not.

    If the additional worker is not ready in time, there is no room for it, and the block runs without.
    """
    added = False
    if room_s > 0:
        report(f"adding a {role.value} worker")
        try:
            client.post("/admin/scale", {role.value: number + 1})
            added = True
            wait_for(client, what_a_role_lacks(role, number + 1), room_s)
        except (InvalidRequestError, UnavailableError):  # at the limit, or none came up
            if added:
                client.post("/admin/scale", {role.value: number})
            added = False
    try:
        yield
    finally:
        if added:
            client.post("/admin/scale", {role.value: number})
    if added:
        report(f"draining the additional {role.value} worker")
        wait_for(client, what_a_role_lacks(role, number), wait_s)

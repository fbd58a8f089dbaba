"""`tandem drain` and `tandem rollout`: what they ask of a cluster, and how they wait for it.

A rollout, role by role:

    one worker more, if there is room ──► for each of the old ones: drained, restarted, ready again ──► the extra one drained
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.commands.http_client import ApiClient
from protocol.errors import InvalidRequestError, UnavailableError
from protocol.messages import Role

_ASK_AGAIN_S = 0.2

Workers = Sequence[Mapping[str, Any]]
"""As in an answer of /admin/status."""


def drain_and_wait(client: ApiClient, worker_id: str, restart: bool, wait_s: float) -> None:
    """Raises InvalidRequestError if the worker can't be drained, UnavailableError if it takes longer than `wait_s`."""
    epoch = _epoch(_workers(client), worker_id)
    client.post("/admin/drain", {"worker": worker_id, "restart": restart})
    if wait_s > 0:
        console = Console(stderr=True)
        with console.status(f"draining {worker_id}"):
            _wait(client, lambda workers: _left(workers, worker_id, epoch, restart), wait_s)
        console.print(f"{worker_id} {'was restarted' if restart else 'is gone'}", highlight=False)


def roll_out(client: ApiClient, room_s: float, wait_s: float) -> None:
    """Restart every worker that is there now. Raises UnavailableError if one takes longer than `wait_s`."""
    before = {role: [w for w in _workers(client) if w["role"] == role.value and w["state"] != "draining"] for role in Role}
    before = {role: workers for role, workers in before.items() if workers}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("rollout", total=sum(len(workers) for workers in before.values()))

        def report(text: str) -> None:
            progress.update(bar, description=text)

        for role, workers in before.items():
            with _one_more(client, role, len(workers), room_s, wait_s, report):
                for worker in workers:
                    worker_id, epoch = worker["worker_id"], worker["epoch"]
                    report(f"restarting {worker_id}")
                    if _epoch(_workers(client), worker_id) == epoch:  # else it has died meanwhile, and is new
                        client.post("/admin/drain", {"worker": worker_id, "restart": True})
                    _wait(client, lambda now, w=worker_id, e=epoch: _left(now, w, e, restart=True), wait_s)  # type: ignore[misc]
                    progress.advance(bar)
        report("all workers are new")


@contextmanager
def _one_more(
    client: ApiClient, role: Role, number: int, room_s: float, wait_s: float, report: Callable[[str], None]
) -> Iterator[None]:
    """So that what a worker does finds another one. If it does not get ready in time there is no room for it."""
    added = False
    if room_s > 0:
        report(f"adding a {role.value} worker")
        try:
            client.post("/admin/scale", {role.value: number + 1})
            added = True
            _wait(client, lambda workers: _late(workers, role, number + 1), room_s)
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
        _wait(client, lambda workers: _late(workers, role, number), wait_s)


def _wait(client: ApiClient, left: Callable[[Workers], str | None], deadline_s: float) -> None:
    """Until nothing is left to do. Raises UnavailableError with what is, at the deadline."""
    end = time.monotonic() + deadline_s
    while (what := left(_workers(client))) is not None:
        if time.monotonic() > end:
            raise UnavailableError(f"not done after {deadline_s:g} s: {what}")
        time.sleep(_ASK_AGAIN_S)


def _left(workers: Workers, worker_id: str, epoch: int | None, restart: bool) -> str | None:
    """What keeps this life of a worker from being over and, if wanted, the next from being ready; for people."""
    worker = next((worker for worker in workers if worker["worker_id"] == worker_id), None)
    if worker is not None and worker["epoch"] == epoch:
        return f"{worker_id} is {worker['state']} with {worker['running'] or 0} streams"
    if restart and (worker is None or not _usable(worker)):
        return f"{worker_id} has not started again" + (f": {worker['last_error']}" if worker else "")
    return None


def _late(workers: Workers, role: Role, number: int) -> str | None:
    """Unless just so many workers of this role are there and usable."""
    found = [worker for worker in workers if worker["role"] == role.value]
    usable = sum(map(_usable, found))
    return None if len(found) == usable == number else f"{usable} of {number} {role.value} workers are ready"


def _usable(worker: Mapping[str, Any]) -> bool:
    """Ready, and in reach of the router that answers."""
    return worker["state"] == "ready" and worker["running"] is not None


def _epoch(workers: Workers, worker_id: str) -> int | None:
    return next((worker["epoch"] for worker in workers if worker["worker_id"] == worker_id), None)


def _workers(client: ApiClient) -> Workers:
    found: Workers = client.get("/admin/status")["workers"]
    return found

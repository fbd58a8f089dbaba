"""How commands wait for a cluster: they ask for its workers again and again until nothing is left to do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cluster.commands.lib.http_client import ApiClient
from protocol.errors import UnavailableError
from protocol.messages.workers import Duty, Role

_ASK_AGAIN_S = 0.2
_PATIENCE_S = 60.0
"""Seconds without an answer after which a cluster counts as gone: a router that goes, or a proxy, may break a connection."""

_T = TypeVar("_T")

Status = Mapping[str, Any]
"""An answer of /admin/status."""

Workers = Sequence[Mapping[str, Any]]
"""The rows of workers in it."""

Lacking = Callable[[Status], str | None]
"""Says what is not as wanted yet, in words for people; None when everything is."""


def current_workers(client: ApiClient) -> Workers:
    """The workers that the cluster has now. Raises TandemError if it does not answer."""
    found: Workers = client.get("/admin/status")["workers"]
    return found


def wait_for(client: ApiClient, lacking: Lacking, deadline_s: float, on_look: Callable[[str], None] | None = None) -> None:
    """Wait until nothing is lacking; `on_look` is told what is, after each look at the cluster.

    Raises UnavailableError that says what is still lacking after `deadline_s` seconds, or that nobody answers for a minute.
    """
    end = time.monotonic() + deadline_s
    while (what := lacking(patient_status(client, end))) is not None:
        if time.monotonic() > end:
            raise UnavailableError(f"not done after {deadline_s:g} s: {what}")
        if on_look is not None:
            on_look(what)
        time.sleep(_ASK_AGAIN_S)


def patient_status(client: ApiClient, end: float = math.inf) -> Status:
    """Ask for /admin/status until there is an answer. Raises UnavailableError after a minute without one, or at `end`."""
    answer: Status = patiently(lambda: client.get("/admin/status"), end)
    return answer


def patiently(ask: Callable[[], _T], end: float = math.inf) -> _T:
    """Ask until there is an answer, and return it: for what does no more if it is obeyed twice.

    Raises UnavailableError after a minute without an answer, or at `end`.
    """
    end = min(end, time.monotonic() + _PATIENCE_S)
    while True:
        try:
            return ask()
        except UnavailableError:
            if time.monotonic() > end:
                raise
        time.sleep(_ASK_AGAIN_S)


def what_a_drain_lacks(worker_id: str, epoch: int | None, restart: bool) -> Lacking:
    """What keeps the life `epoch` of a worker from being over and, with `restart`, its next life from being ready."""

    def lacking(status: Status) -> str | None:
        worker = find_worker(status["workers"], worker_id)
        if worker is not None and worker["epoch"] == epoch:
            return f"{worker_id} is {worker['state']} with {worker['running'] or 0} streams"
        if restart and (worker is None or not _usable(worker)):
            return f"{worker_id} has not started again" + (f": {worker['last_error']}" if worker else "")
        return None

    return lacking


def what_a_restart_lacks(worker: Mapping[str, Any]) -> Lacking:
    """What a worker lacks that was told to start anew, until it is ready. `worker` is its row of /admin/status before that.

    One that was starting then is new already.
    """
    epoch = None if worker["state"] == "starting" else worker["epoch"]
    return what_a_drain_lacks(worker["worker_id"], epoch, restart=True)


def what_a_role_lacks(role: Role, number: int) -> Lacking:
    """What keeps a role from having exactly `number` workers, all of them usable."""

    def lacking(status: Status) -> str | None:
        found = of_role(status["workers"], role)
        usable = sum(map(_usable, found))
        return None if len(found) == usable == number else f"{usable} of {number} {role.value} workers are ready"

    return lacking


def of_role(workers: Workers, role: Role) -> Workers:
    """The workers of a role, those that do both with the decode workers. Those on standby have none."""
    return [worker for worker in workers if Duty(worker["role"]).role is role and not worker.get("standby")]


def find_worker(workers: Workers, worker_id: str) -> Mapping[str, Any] | None:
    """The row of /admin/status of a worker; None if there is no such worker."""
    return next((worker for worker in workers if worker["worker_id"] == worker_id), None)


def _usable(worker: Mapping[str, Any]) -> bool:
    """A worker is usable when it is ready or on standby, and in reach of the router that answers."""
    return worker["state"] in ("ready", "standby") and worker["running"] is not None

"""`tandem rollout`: restarts all workers of a cluster, one after the other, or has them take another configuration.

    one worker more, if there is room ──► for each of the old ones: drained, restarted, ready again ──► the extra one drained

That is done for one role, then for the other. Workers on standby are restarted at the end. An autoscaler keeps quiet meanwhile.
With `--config`, the controller does all of it (`cluster.commands.workers.new_config`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.interrupts import undone_when_ended
from cluster.commands.lib.options import DEFAULT_URL, LONGEST_S, AdminKey, Url
from cluster.commands.lib.waiting import (
    Lacking,
    Status,
    Workers,
    current_workers,
    find_worker,
    of_role,
    patient_status,
    patiently,
    wait_for,
    what_a_drain_lacks,
    what_a_restart_lacks,
    what_a_role_lacks,
)
from cluster.commands.workers.new_config import abort, parse_share, try_config
from protocol.cluster_view import PAUSED_BY_HAND, SCALED_BY_HAND
from protocol.errors import InvalidRequestError, UnavailableError
from protocol.messages.workers import Role

Report = Callable[[str], None]
"""A function that is told what is being done, in words for people."""

_ASK_AGAIN_S = 1.0
_ROLLOUT_S = 2 * 86_400.0
"""Longest time that the rollout of a configuration is waited for, which is watched for a day at most."""


def rollout(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    room_s: Annotated[
        float | None,
        typer.Option(
            "--room",
            min=0.0,
            max=LONGEST_S,
            help="Without --config: seconds to wait for one worker more of each role, by default 120; 0 does without.",
        ),
    ] = None,
    wait_s: Annotated[
        float | None,
        typer.Option(
            "--wait",
            min=0.0,
            max=LONGEST_S,
            help="Without --config: seconds that one worker may take to drain and to start; by default 780.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with what changes for workers: tried on some requests, then taken by all.")
    ] = None,
    canary: Annotated[
        str | None, typer.Option(help="With --config: the share of new requests that try it; by default 10%.")
    ] = None,
    watch_s: Annotated[
        float | None,
        typer.Option("--watch", min=0.1, max=86_400.0, help="With --config: seconds to compare it at least; by default 300."),
    ] = None,
    min_requests: Annotated[
        int | None,
        typer.Option(min=10, max=1_000_000, help="With --config: requests to compare at least, of either kind; by default 20."),
    ] = None,
    give_up: Annotated[bool, typer.Option("--abort", help="End the rollout of a configuration that is under way.")] = False,
) -> None:
    """Restart all workers, one after the other, while requests run, or give them another configuration (--config).

    A configuration that is worse on its share of the requests is rolled back by itself.
    """
    tried = _given({"--canary": canary, "--watch": watch_s, "--min-requests": min_requests})
    restarts = _given({"--room": room_s, "--wait": wait_s})
    if config is None and tried:
        raise InvalidRequestError(f"{tried}: name the configuration that is tried with --config", param="config")
    if config is not None and give_up:
        raise InvalidRequestError("--abort ends the rollout that is under way: leave out --config", param="abort")
    if restarts and (config is not None or give_up):
        raise InvalidRequestError(f"{restarts}: only for a rollout without --config and --abort", param="room")
    client = ApiClient(url, admin_key)
    if give_up:
        abort(client)
    elif config is not None:
        share = parse_share("10%" if canary is None else canary)
        least = (300.0 if watch_s is None else watch_s, 20 if min_requests is None else min_requests)
        try_config(client, config, share, *least)
    else:
        with undone_when_ended():
            roll_out(client, 120.0 if room_s is None else room_s, 780.0 if wait_s is None else wait_s)


def _given(flags: Mapping[str, object]) -> str:
    """The flags that have a value, with commas."""
    return ", ".join(flag for flag, value in flags.items() if value is not None)


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
            with _one_more(client, role, room_s, wait_s, report) if workers else nullcontext():
                _restart_each(client, workers, wait_s, report, lambda: progress.advance(bar))
        _restart_each(client, waiting, wait_s, report, lambda: progress.advance(bar))
        report("all workers are new")


@contextmanager
def _autoscaler_quiet(client: ApiClient, state: Mapping[str, Any] | None) -> Iterator[None]:
    """While the block runs, the autoscaler, whose state is that of /admin/status, changes nothing.

    If an operator changes workers meanwhile, it stays paused, as after any such order.
    """
    if state is None or state["paused"]:
        yield
        return
    pauses, before = True, dict[str, int]()
    try:
        try:
            patiently(lambda: client.post("/admin/autoscale", {"action": "pause"}))
        except InvalidRequestError:
            pauses = False
            raise
        before = patient_status(client)["wanted"]  # it may have changed them until the pause
        yield
    finally:
        if pauses:
            left = "the autoscaler is paused: `tandem autoscale resume`"
            _undo(lambda: _resume(client, before), left)


def _resume(client: ApiClient, before: Mapping[str, int]) -> None:
    """Let the autoscaler go on, unless an operator has changed workers since the sizes `before` were wanted."""
    status = client.get("/admin/status")
    reason = (status["autoscaler"] or {}).get("paused")
    # A paused autoscaler changes one thing: it wakes a role at 0.
    scaled = any(number and _scaled(status, Role(role), number) for role, number in before.items())
    # An operator may have had it go on, or the router that answers has not heard yet that it is paused.
    if reason is not None and (scaled or not reason.startswith((PAUSED_BY_HAND, SCALED_BY_HAND))):
        _say("the autoscaler stays paused, since workers were changed by hand meanwhile: `tandem autoscale resume`")
        return
    client.post("/admin/autoscale", {"action": "resume"})


def _restart_each(client: ApiClient, workers: Workers, wait_s: float, report: Report, on_restarted: Callable[[], None]) -> None:
    """Restart these workers in turn. Raises UnavailableError if one takes longer than `wait_s` seconds."""
    for worker in workers:
        worker_id, epoch = worker["worker_id"], worker["epoch"]
        report(f"restarting {worker_id}")
        lacking = patiently(partial(_begin_restart, client, worker_id, epoch))
        if lacking is not None:
            wait_for(client, lacking, wait_s)
        on_restarted()


def _begin_restart(client: ApiClient, worker_id: str, epoch: int) -> Lacking | None:
    """Have the worker restarted unless this life of it is over. Return what it lacks until then; None if it goes for good."""
    present = find_worker(current_workers(client), worker_id)
    if present is None:
        return None
    # Else an order without an answer was obeyed, or it died, or has gone in the extra one's place.
    if present["epoch"] != epoch:
        return _unless_gone(worker_id, what_a_drain_lacks(worker_id, epoch, restart=True))
    try:
        client.post("/admin/drain", {"worker": worker_id, "restart": True})
    except InvalidRequestError as refusal:
        if refusal.param != "worker":
            raise
        return None  # it drains for good, or leaves with its node
    return _unless_gone(worker_id, what_a_restart_lacks(present))


def _unless_gone(worker_id: str, lacking: Lacking) -> Lacking:
    """What a worker lacks that is restarted: nothing once an operator, or its node's end, has it go for good."""
    return lambda status: None if find_worker(status["workers"], worker_id) is None else lacking(status)


@contextmanager
def _one_more(client: ApiClient, role: Role, room_s: float, wait_s: float, report: Report) -> Iterator[None]:
    """While the block runs, the role has one worker more than are wanted now, which takes what the others do not.

    If the additional worker is not ready in time, there is no room for it, and the block runs without. Whatever else ends the
    wait for it takes it back, too. If an operator changes the role's size meanwhile, it stays as the operator wants it.
    """
    number = patient_status(client)["wanted"].get(role.value, 0)  # one that is restarting already is wanted
    added = room_s > 0
    try:
        if added:
            report(f"adding a {role.value} worker")
            added = _has_come(client, role, number, room_s)
        yield
    finally:
        if added:
            _take_back(client, role, number)
    if added:
        report(f"draining the additional {role.value} worker")
        wait_for(client, _unless_scaled(role, number, what_a_role_lacks(role, number)), wait_s)


def _has_come(client: ApiClient, role: Role, number: int, room_s: float) -> bool:
    """Ask for one worker more than `number`, and wait until it is ready. If it is not, take it back and return False."""
    try:
        patiently(lambda: client.post("/admin/scale", {role.value: number + 1}))
    except InvalidRequestError:  # at the limit
        return False
    try:
        wait_for(client, _unless_scaled(role, number, what_a_role_lacks(role, number + 1)), room_s)
    except (InvalidRequestError, UnavailableError):  # none came up
        _take_back(client, role, number)
        return False
    return True


def _take_back(client: ApiClient, role: Role, number: int) -> None:
    """Want `number` workers of the role again, unless an operator wants another number by now."""

    def order() -> None:
        if not _scaled(client.get("/admin/status"), role, number):
            client.post("/admin/scale", {role.value: number})

    _undo(order, f"there is a {role.value} worker too many: `tandem scale {role.value}={number}`")


def _unless_scaled(role: Role, number: int, lacking: Lacking) -> Lacking:
    """What is lacking while a rollout alone sizes the role: nothing once an operator wants another number."""
    return lambda status: None if _scaled(status, role, number) else lacking(status)


def _scaled(status: Status, role: Role, number: int) -> bool:
    """Whether others have sized the role, of which a rollout wants `number` workers, and one more for a while."""
    # A router may not have heard yet which of the two is wanted now.
    return status["wanted"].get(role.value, 0) not in (number, number + 1)


def _undo(order: Callable[[], Any], left: str) -> None:
    """Give an order that takes something back, also where a configuration that is rolled out has it refused until the end.

    If it can't be given, it prints what is `left` to do.
    """
    end, waits = time.monotonic() + _ROLLOUT_S, False
    try:
        while True:
            try:
                patiently(order)
                return
            except InvalidRequestError as refusal:
                if refusal.param != "rollout" or time.monotonic() > end:
                    raise
            if not waits:
                waits = True
                _say("a configuration is rolled out: what this rollout has changed is taken back when that is over")
            time.sleep(_ASK_AGAIN_S)
    except BaseException:
        _say(f"left to do: {left}")
        raise


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone, and the rest is to be taken back all the same
        typer.echo(text, err=True)

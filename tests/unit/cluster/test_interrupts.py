"""Signals to `tandem serve`: the first ends it gently, the second at once, the third does nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from cluster.commands.lib.foreground import retire
from cluster.commands.lib.interrupts import Interrupts, Phase
from cluster.commands.stop import stop
from protocol.errors import UnavailableError


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_while_it_serves_and_no_more(number: signal.Signals) -> None:
    interrupts = Interrupts()
    interrupts.install()
    interrupts.phase = Phase.SERVING
    for expected in (Phase.RETIRING, Phase.ENDING):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert interrupts.phase is expected
    signal.raise_signal(number)


def test_one_signal_while_it_starts() -> None:
    interrupts = Interrupts()
    interrupts.install()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


def test_a_stop_whose_terminal_is_lost_goes_on_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two steps the cluster refuses every request."""
    steps: list[str] = []

    @contextmanager
    def joined(address: str) -> Iterator[None]:
        yield

    def retire_cluster(deadline_s: float | None) -> None:
        assert deadline_s is None, "the cluster's own"
        signal.raise_signal(signal.SIGHUP)
        steps.append("retired")

    def remove_cluster() -> bool:
        signal.raise_signal(signal.SIGHUP)
        steps.append("removed")
        return True

    def die(*_: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGHUP, die)  # as a process without a handler does
    monkeypatch.setattr("cluster.ray.session.joined_ray", joined)
    monkeypatch.setattr("cluster.teardown.retire_cluster", retire_cluster)
    monkeypatch.setattr("cluster.teardown.remove_cluster", remove_cluster)
    stop(address="auto")
    assert steps == ["retired", "removed"]


class ScriptedCluster:
    def __init__(self, outcome: int | BaseException) -> None:
        self._outcome = outcome

    def retire(self, deadline_s: float) -> int:
        assert deadline_s == 20.0
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (0, None),
        (3, "requests that are cut off: 3"),
        (KeyboardInterrupt(), None),
        (UnavailableError("gone"), "stopping at once: gone"),
    ],
)
def test_what_the_end_says(outcome: int | BaseException, says: str | None) -> None:
    console = Console(soft_wrap=True)
    with console.capture() as captured:
        retire(ScriptedCluster(outcome), 20.0, console)  # type: ignore[arg-type]
    lines = captured.get().splitlines()
    assert lines[0] == "stopping: requests that run have 20 s; Ctrl-C ends them at once"
    assert lines[1:] == ([] if says is None else [says])

"""`tandem serve` where what it says can't be written: on a full disk, and through a pipe whose reader has gone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import pytest

from cluster.commands.lib import foreground
from cluster.commands.lib.foreground import progress_console, retire
from configs.schema import ClusterConfig
from protocol.cluster_view import ClusterView
from protocol.errors import UnavailableError


@pytest.fixture(params=["full disk", "pipe without a reader"])
def stream(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    if request.param == "full disk":
        opened = open("/dev/full", "w", buffering=1)  # noqa: SIM115  # closed below
    else:
        reader, writer = os.pipe()
        os.close(reader)
        opened = os.fdopen(writer, "w", buffering=1)
    yield opened
    with suppress(OSError):
        opened.close()


class ScriptedCluster:
    """Another command stops it after three changes."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.retired: list[float] = []

    def watch(self, version: int) -> ClusterView:
        self.asked.append(version)
        if version == 4:
            raise UnavailableError("stopped")
        return ClusterView(version + 1, (), routers=version, stopping=version == 3)

    def retire(self, deadline_s: float) -> int:
        self.retired.append(deadline_s)
        return 3


def test_a_cluster_is_followed_on(stream: TextIO) -> None:
    scripted = ScriptedCluster()
    foreground._follow(scripted, ClusterConfig(), "m", progress_console(stream))  # type: ignore[arg-type]
    assert scripted.asked == [0, 1, 2, 3, 4]


def test_running_requests_have_their_time(stream: TextIO) -> None:
    scripted = ScriptedCluster()
    retire(scripted, 20.0, progress_console(stream))  # type: ignore[arg-type]
    assert scripted.retired == [20.0]


def test_a_start_goes_on(stream: TextIO) -> None:
    console = progress_console(stream)
    console._force_terminal = True
    with console.status("starting") as progress:
        progress.update("starting: Ray")


def test_without_standard_error() -> None:
    progress_console(None).print("ready")

"""The roster's waits for changes, and how it follows the controller."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from configs.schema import LimitsConfig
from protocol.cluster_view import ClusterView
from router.dispatch.controller_client import ControllerClient
from router.dispatch.roster import Roster
from tests.unit.simulated_time import run_in_simulated_time


def test_a_deadline_holds_also_where_something_changes_during_every_look() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        roster = Roster(cast(ControllerClient, None), b"", LimitsConfig(), lambda: None)

        async def look_again_and_again() -> None:
            while loop.time() < 5.0:
                seen = roster.changes
                await asyncio.sleep(0.01)
                roster.note_change()
                await roster.next_change(seen, 1.0)

        with pytest.raises(TimeoutError):
            await look_again_and_again()
        assert loop.time() == pytest.approx(1.0, abs=0.05)

    run_in_simulated_time(scenario())


def test_a_view_that_could_not_be_taken_over_is_taken_over_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the controller's process, which may be of another version for a moment."""

    class Controller:
        async def watch(self, known_version: int) -> ClusterView:
            await asyncio.sleep(0.01 if known_version < 1 else 60)
            return ClusterView(1, ())

    async def scenario() -> None:
        roster = Roster(cast(ControllerClient, Controller()), b"", LimitsConfig(), lambda: None)
        update, failures, taken_over = roster.update, iter(range(2)), asyncio.Event()

        def failing(view: ClusterView) -> None:
            if next(failures, None) is not None:
                raise AttributeError("'WorkerInfo' object has no attribute 'revision'")
            update(view)
            taken_over.set()

        monkeypatch.setattr(roster, "update", failing)
        roster.start()
        async with asyncio.timeout(10):
            await taken_over.wait()
        assert roster.view.version == 1
        await roster.close()

    run_in_simulated_time(scenario())

"""Waits for changes of the roster."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from configs.schema import LimitsConfig
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

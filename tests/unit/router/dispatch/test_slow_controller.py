"""A controller that does not answer in time, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.errors import UnavailableError
from protocol.messages.workers import Role
from router.dispatch import controller_client
from router.dispatch.controller_client import ControllerOrders


def test_it_is_not_said_that_nothing_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_client, "_ORDER_DEADLINE_S", 0.01)

    class Slow:
        async def scale(self, *_: Any) -> None:
            await asyncio.Event().wait()

    controller: Any = Slow()
    with pytest.raises(UnavailableError, match=r"did not answer within 0\.01 s, and may still obey"):
        asyncio.run(ControllerOrders(controller).scale({Role.DECODE: 2}, None))


def test_a_controller_that_dies_before_its_answer_may_have_obeyed() -> None:
    class Dying:
        async def scale(self, *_: Any) -> None:
            raise ConnectionError("the actor is unavailable: the task may or may not have been executed")

    controller: Any = Dying()
    with pytest.raises(UnavailableError, match=r"away \(ConnectionError\), and may have obeyed: see `tandem status`"):
        asyncio.run(ControllerOrders(controller).scale({Role.DECODE: 2}, None))

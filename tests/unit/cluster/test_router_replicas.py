"""How Serve hears how many routers are wanted, without Serve."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster import router_replicas
from cluster.router_replicas import RouterReplicas
from configs.schema import HttpConfig


def test_serve_is_told_until_it_hears_and_the_latest_number_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    away = [True, True]
    asked, heard = threading.Event(), threading.Event()

    def set_target(number: int) -> None:
        asked.set()
        if away:
            away.pop()
            raise ConnectionError("Serve's controller starts again")
        told.append(number)
        heard.set()

    monkeypatch.setattr(router_replicas, "_set_target", set_target)
    monkeypatch.setattr(router_replicas, "_AGAIN_S", 0.05)

    async def scenario() -> None:
        replicas = RouterReplicas()
        replicas.want(3)
        await asyncio.to_thread(asked.wait, 5)
        replicas.want(2)
        await asyncio.to_thread(heard.wait, 5)
        await asyncio.sleep(0.2)
        assert told == [2], "who has heard is told nothing more"
        heard.clear()
        replicas.want(4)
        await asyncio.to_thread(heard.wait, 5)
        assert told == [2, 4]

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray, on import
def test_serve_has_one_number_or_its_own_autoscaling() -> None:
    from cluster.ray.serve_app import size_of_deployment

    assert size_of_deployment(HttpConfig(router_replicas=2)) == {"num_replicas": 2}
    (autoscaling,) = size_of_deployment(HttpConfig(router_replicas=2, max_router_replicas=5)).values()
    assert (autoscaling["min_replicas"], autoscaling["max_replicas"]) == (2, 5)

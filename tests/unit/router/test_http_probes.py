"""What machines ask (/live, /ready), and what a router does when the cluster ends."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig
from protocol.cluster_view import ClusterView, WorkerState
from protocol.messages.workers import Role

Run = Callable[..., None]


def change_view(cluster: Any, **values: Any) -> None:
    view: ClusterView = cluster.controller.view
    cluster.controller.show(*view.workers)
    cluster.controller.view = dataclasses.replace(cluster.controller.view, **values)


def test_live_says_nothing_of_workers_and_ready_does(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        assert (await cluster.http.get("/live")).json() == {"status": "ok"}
        refused = await cluster.http.get("/ready")
        assert (refused.status_code, refused.json()["reason"]) == (503, "no prefill worker is ready")
        cluster.add(Role.PREFILL)
        cluster.add(Role.DECODE)
        cluster.show()
        await cluster.healthy()
        assert (await cluster.http.get("/ready")).json() == {"status": "ok"}

    run_cluster(test, prefill=0, decode=0)


def test_monitors_may_ask_without_wanting_the_body(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        for path, status in (("/live", 200), ("/ready", 503), ("/health", 503)):
            told, asked = await cluster.http.get(path), await cluster.http.head(path)
            assert (asked.status_code, asked.content) == (status, b"")
            assert asked.headers["content-length"] == told.headers["content-length"]
        assert (await cluster.http.head("/v1/models")).status_code == 200
        assert (await cluster.http.head("/v1/chat/completions")).status_code == 405

    run_cluster(test, prefill=0, decode=0)


def test_a_role_that_sleeps_by_decision_is_ready_and_one_that_is_missing_is_not(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.add(Role.DECODE)
        cluster.show()
        await cluster.until(lambda: cluster.router.health_problem() == "no prefill worker is ready")
        change_view(cluster, wanted={Role.PREFILL: 0, Role.DECODE: 1}, routers=3)
        await cluster.until(lambda: cluster.router.ready_problem() is None)
        assert (await cluster.http.get("/ready")).status_code == 200
        assert (await cluster.http.get("/health")).status_code == 200, "a request would have one started"
        status = (await cluster.http.get("/admin/status")).json()
        assert status["wanted"] == {"prefill": 0, "decode": 1}
        assert status["routers"] == {"wanted": 3, "ready": 1}
        change_view(cluster, wanted={Role.PREFILL: 1, Role.DECODE: 1})
        await cluster.until(lambda: cluster.router.ready_problem() == "no prefill worker is ready")
        [decode] = cluster.controller.view.workers
        change_view(cluster, workers=(replace(decode, both=True, term=1),))
        await cluster.until(lambda: cluster.router.ready_problem() is None)
        [row] = (await cluster.http.get("/admin/status")).json()["workers"]
        assert row["role"] == "both"
        starting = replace(decode, worker_id="decode-1", both=True, ref=None, state=WorkerState.STARTING, quick_ends=1)
        change_view(cluster, workers=(decode, starting))
        await cluster.until(lambda: cluster.router.ready_problem() == "no prefill worker is ready")
        change_view(cluster, wanted={Role.PREFILL: 0, Role.DECODE: 2})
        await cluster.until(lambda: cluster.router.ready_problem() is None)

    run_cluster(test, prefill=0, decode=0, autoscale={"sizes": {"prefill": "0..1"}})


def test_a_role_that_nobody_wakes_is_missing_though_none_is_wanted(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.add(Role.DECODE)
        change_view(cluster, wanted={Role.PREFILL: 0, Role.DECODE: 1})
        await cluster.until(lambda: cluster.router.ready_problem() == "no prefill worker is ready")

    run_cluster(test, prefill=0, decode=0)


def test_when_the_cluster_ends_streams_go_on_and_nothing_new_is_let_in(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.script.step_s = 0.02
        cluster.says("one two three " * 10)
        stream, lines = await cluster.start_stream(max_tokens=40, ignore_eos=True)
        assert cluster.controller.open_requests == {}, "nobody is told without need"
        change_view(cluster, stopping=True)
        await cluster.until(lambda: list(cluster.controller.open_requests.values()) == [1])
        refused = await cluster.complete()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["message"] == "this cluster is shutting down"
        assert (await cluster.http.get("/ready")).json()["reason"] == "the cluster is shutting down"
        assert (await cluster.http.get("/live")).status_code == 200
        assert (await cluster.http.get("/admin/status")).status_code == 200, "operators may look on"
        rest = [line async for line in lines]
        assert "data: [DONE]" in rest
        await stream.__aexit__(None, None, None)
        await cluster.until(lambda: list(cluster.controller.open_requests.values()) == [0])
        await cluster.clean()

    run_cluster(test)


def test_the_log_line_of_a_request_names_the_tenant_and_the_key(
    run_cluster: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, {"tenant": "acme"})

    async def test(cluster: Any) -> None:
        cluster.http.headers["authorization"] = f"Bearer {key}"
        assert (await cluster.complete(max_tokens=2)).status_code == 200
        [line] = [record for record in caplog.records if record.getMessage() == "request"]
        named: Any = line.__dict__["fields"]
        assert (named["tenant"], named["key"]) == ("acme", key.split("-")[1])
        assert key.split("-", 2)[2] not in str(named)

    with caplog.at_level(logging.INFO):
        run_cluster(test, http=HttpConfig(keys_file=str(path)).model_dump())

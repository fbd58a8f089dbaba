"""`traceparent` over HTTP: continued to the workers and the log, answered with every answer and error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import WorkerLostError

Run = Callable[..., None]

TRACE = "0af7651916cd43dd8448eb211c80319c"
SENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "rojo=00f067aa0ba902b7", "x-request-id": "mine"}
BODY = {"model": "smollm2", "prompt": "a", "max_tokens": 3}


def test_a_trace_reaches_workers_log_and_answer(run_cluster: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def test(cluster: Any) -> None:
        with caplog.at_level(logging.INFO, logger="router"):
            answer = await cluster.http.post("/v1/completions", json=BODY | {"stream": True}, headers=SENT)
        message = cluster.prefill[0].seen[0]
        [reserved] = cluster.decode[0].reserved
        assert answer.headers["traceparent"] == message.trace.traceparent == reserved.trace.traceparent
        assert (message.trace.trace_id, message.trace.state) == (TRACE, SENT["tracestate"])
        assert answer.headers["tracestate"] == SENT["tracestate"]
        [line] = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
        assert (line["trace"], line["request"]) == (TRACE, "mine")

    run_cluster(test)


def test_each_request_has_a_span_of_its_own_and_errors_have_theirs(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cases = [("/v1/completions", BODY, 200), ("/v1/completions", {}, 400), ("/v1/nothing", {}, 404)]
        answers = [(await cluster.http.post(path, json=body, headers=SENT), status) for path, body, status in cases]
        for answer, status in answers:
            assert answer.status_code == status
            assert answer.headers["x-request-id"] == "mine"
            assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
        assert len({answer.headers["traceparent"] for answer, _ in answers}) == 3

    run_cluster(test)


def test_an_invalid_trace_is_a_new_one(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        sent = [("traceparent", SENT["traceparent"]), ("traceparent", SENT["traceparent"]), ("tracestate", "a=1")]
        answer = await cluster.http.post("/v1/completions", json=BODY, headers=sent)
        assert TRACE not in answer.headers["traceparent"]
        assert "tracestate" not in answer.headers

    run_cluster(test)


def test_a_failed_attempt_is_logged_with_its_trace(run_cluster: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def test(cluster: Any) -> None:
        cluster.prefill[0].fail_with = WorkerLostError("gone")
        with caplog.at_level(logging.WARNING, logger="router.request.pipeline"):
            answer = await cluster.http.post("/v1/completions", json=BODY, headers=SENT)
        assert answer.status_code == 503
        ours = [record for record in caplog.records if record.name == "router.request.pipeline"]
        assert {record.__dict__["fields"]["trace"] for record in ours} == {TRACE}

    run_cluster(test)

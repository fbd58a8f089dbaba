"""Spans of requests, as a collector gets them: a real one in OTLP's terms, over HTTP, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from configs.loader import load_config
from protocol.errors import ConfigError
from telemetry import spans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP; `spans` are all that came, by their names."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        self.services: set[str] = set()
        here = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    here.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
                    here.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(10)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with Collector().serving() as collector:
        yield collector


def traced(run_cluster: Callable[..., None], collector: Collector, test: Callable[[Any], Any]) -> None:
    run_cluster(test, telemetry={"otlp_endpoint": collector.url})


def test_a_request_continues_the_clients_trace(run_cluster: Callable[..., None], collector: Collector) -> None:
    async def test(cluster: Any) -> None:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "other=1"}
        body = {"model": "smollm2", "prompt": "Count:", "max_tokens": 6, "include_times": True}
        answer = await cluster.http.post("/v1/completions", json=body, headers=headers)
        [times] = answer.json()["usage"]["times"]
        await cluster.until(lambda: any(span.name == "tandem.request" for span in collector.spans))
        [request] = [span for span in collector.spans if span.name == "tandem.request"]
        assert request.trace_id.hex() == TRACE
        assert request.parent_span_id.hex() == PARENT
        assert request.span_id.hex() == answer.headers["traceparent"].split("-")[2], "the client was told this id"
        assert request.trace_state == "other=1"
        children = [span for span in collector.spans if span is not request]
        assert all(span.parent_span_id == request.span_id and span.trace_id == request.trace_id for span in children)
        assert len({span.span_id for span in collector.spans}) == len(collector.spans)
        length = {span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in collector.spans}
        for stage in ("prepare", "queue", "prefill", "decode_queue"):
            span_s = length.get(f"tandem.{stage}", 0.0)  # a stage that took no time has no span
            assert span_s == pytest.approx(times["stages"][stage], abs=1e-5)
        whole = length.pop("tandem.request")
        assert sum(length.values()) == pytest.approx(whole, rel=0.01), "the stages are all of the request"
        assert collector.services == {"tandem-router"}

    traced(run_cluster, collector, test)


def test_who_does_not_record_is_not_recorded(run_cluster: Callable[..., None], collector: Collector) -> None:
    async def test(cluster: Any) -> None:
        body = {"model": "smollm2", "prompt": "Count:", "max_tokens": 3}
        silent = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert (await cluster.http.post("/v1/completions", json=body, headers=silent)).status_code == 200
        begun_here = await cluster.http.post("/v1/completions", json=body)
        await cluster.until(lambda: any(span.name == "tandem.request" for span in collector.spans))
        [request] = [span for span in collector.spans if span.name == "tandem.request"]
        assert request.trace_id.hex() == begun_here.headers["traceparent"].split("-")[1] != TRACE
        assert not request.parent_span_id

    traced(run_cluster, collector, test)


def test_choices_and_clients_that_leave(run_cluster: Callable[..., None], collector: Collector) -> None:
    async def test(cluster: Any) -> None:
        await cluster.complete(n=2, max_tokens=3)
        await cluster.until(lambda: any(span.name == "tandem.request" for span in collector.spans))
        prefills = [span for span in collector.spans if span.name == "tandem.prefill"]
        assert sorted(span.attributes[0].value.int_value for span in prefills) == [0, 1]
        cluster.script.step_s = 0.05
        cluster.script.answer = tuple(cluster.tokenizer.encode(" one two three"))
        stream, _ = await cluster.start_stream(max_tokens=1000, ignore_eos=True)
        await stream.__aexit__(None, None, None)
        await cluster.until(lambda: sum(span.name == "tandem.request" for span in collector.spans) == 2)
        [left] = [span for span in collector.spans if span.name == "tandem.request" and span.status.message]
        assert left.status.message == "cancelled"
        await cluster.clean()

    traced(run_cluster, collector, test)


def test_a_collector_that_is_away_costs_no_answer(run_cluster: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")

    async def test(cluster: Any) -> None:
        async with asyncio.timeout(10):
            assert (await cluster.complete()).status_code == 200

    run_cluster(test, telemetry={"otlp_endpoint": "http://127.0.0.1:9"})


def test_missing_packages_are_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install --editable '.\[otlp\]'"):
        spans.check_installed()


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_endpoints_are_checked(endpoint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, {"telemetry.otlp_endpoint": endpoint})
    assert error.value.param == "telemetry.otlp_endpoint"

"""Requests as OpenTelemetry spans, sent by OTLP over HTTP: one for the request, and under it one for each stage of each answer.

The request's span continues the client's trace and has the id that the answer's `traceparent` told, so what the client and the
workers' log lines say of it can be found together. A client's decision not to record its trace is kept; what begins here is
recorded. The packages are optional (`.venv/bin/pip install --editable '.[otlp]'`) and imported only where an endpoint is set.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from protocol.errors import ConfigError
from protocol.trace import TraceContext, new_span_id
from telemetry.request_times import Stretch

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

Attributes = Mapping[str, str | int | float | bool]

_TRACES_PATH = "/v1/traces"


class SpanExport:
    """Sends spans to a collector: they are queued, sent in batches by a thread, and dropped while the collector is away for
    long.

    `endpoint` is the collector's base URL, such as http://localhost:4318. Raises ConfigError if the packages are not
    installed.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._resource = Resource.create({"service.name": service})
        self._scope = InstrumentationScope("tandem")
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint.rstrip("/") + _TRACES_PATH))

    def request(
        self,
        trace: TraceContext,
        start: float,
        end: float,
        attributes: Attributes,
        answers: Sequence[Iterable[Stretch]],
        error: str | None,
    ) -> None:
        """Queue the spans of one request, with the stages of each of its answers. Moments are `time.monotonic()`; `error`
        tells that it failed.

        Returns at once, and does nothing if the client does not record its trace.
        """
        if trace.parent_id and not trace.sampled:
            return
        own = _context(trace, trace.span_id, remote=False)
        parent = _context(trace, trace.parent_id, remote=True) if trace.parent_id else None
        offset = time.time() - time.monotonic()
        for index, stretches in enumerate(answers):
            for stretch in stretches:
                context = _context(trace, new_span_id(), remote=False)
                values = {"tandem.choice": index}
                begin, stop = stretch.start + offset, stretch.end + offset
                self._processor.on_end(self._span(f"tandem.{stretch.stage.value}", context, own, begin, stop, values, None))
        span = self._span("tandem.request", own, parent, start + offset, end + offset, attributes, error)
        self._processor.on_end(span)

    def close(self) -> None:
        """Send what is queued and end the thread. Blocks, for seconds if the collector is away."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the SDK has no type for it

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start: float,
        end: float,
        attributes: Attributes,
        error: str | None,
    ) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        is_request = parent is None or parent.is_remote
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=dict(attributes),
            kind=SpanKind.SERVER if is_request else SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
            start_time=int(start * 1e9),
            end_time=int(end * 1e9),
            instrumentation_scope=self._scope,
        )


def check_installed() -> None:
    """Check that spans can be sent. Raises ConfigError naming the package that is missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError:
        problem = (
            "telemetry.otlp_endpoint: it needs packages that are not installed: .venv/bin/pip install --editable '.[otlp]'"
        )
        raise ConfigError(problem, param="telemetry.otlp_endpoint") from None


def _context(trace: TraceContext, span_id: str, *, remote: bool) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    flags, state = TraceFlags(TraceFlags.SAMPLED), TraceState.from_header([trace.state]) if trace.state else None
    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), remote, flags, state)

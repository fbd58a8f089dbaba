"""Every metric of Tandem, by name, once. Where vLLM measures the same thing its name is used, `vllm:` made `tandem:`.

A `Metrics` owns its registry, so two routers in one process don't share counts. Worker gauges are read from the latest
load reports when Prometheus asks; nothing is done per report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.messages import LoadReport, Role

# vLLM's buckets (vllm/v1/metrics/loggers.py), in seconds.
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


@dataclass(frozen=True)
class WorkerSample:
    """What is known of one worker when the metrics are read. `report` is None until its first one arrives."""

    worker_id: str
    role: Role
    restarts: int
    report: LoadReport | None


WorkerSource = Callable[[], Iterable[WorkerSample]]


class Metrics:
    """Counters and histograms of one router; the attributes are ready to use, labels bound."""

    def __init__(self, model_name: str, workers: WorkerSource) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Gap between two outputs.", _ITL_BUCKETS)
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST_BUCKETS
        )
        self.request_queue_time = self._histogram(
            "request_queue_time_seconds", "Wait for room at the router and in prefill's queue.", _REQUEST_BUCKETS
        )
        self.request_prefill_time = self._histogram(
            "request_prefill_time_seconds", "Prefill, as the worker reports it.", _REQUEST_BUCKETS
        )
        self.request_decode_time = self._histogram(
            "request_decode_time_seconds", "From the first to the last token.", _REQUEST_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens given to clients.")
        self.resumed_streams = self._counter("resumed_streams", "Streams that went on elsewhere, or when a client came back.")
        self._inexact_streams = Counter(
            "tandem:inexact_streams",
            "Streams of several arithmetics: handed over to another (mixed_kv), or gone on under another or one that varies "
            "(resumed).",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self.kv_transfer_failures = self._counter("kv_transfer_failures", "KV caches that did not arrive whole.")
        self.workers_lost = self._counter("workers_lost", "Connections to workers that broke or fell silent.")
        self._success = Counter(
            "tandem:request_success", "Requests that ended well.", ("model_name", "finished_reason"), registry=self.registry
        )
        self._errors = Counter(
            "tandem:request_errors", "Requests that ended in an error.", ("model_name", "code"), registry=self.registry
        )
        self._decisions = Counter(
            "tandem:disaggregation_decisions",
            "Where prompts were computed: there (at a prefill worker) or here (where they are decoded).",
            ("model_name", "decision"),
            registry=self.registry,
        )
        self.migration_pause = self._histogram(
            "migration_pause_seconds",
            "Gap between a moved stream's last output at one worker and its first at the next.",
            _ITL_BUCKETS,
        )
        self._migrations = Counter(
            "tandem:migrations",
            "Moves of running streams to another decode worker.",
            ("model_name", "reason", "outcome"),
            registry=self.registry,
        )
        self._copies = Counter(
            "tandem:kv_copies",
            "Copies of running streams' KV at another decode worker.",
            ("model_name", "outcome"),
            registry=self.registry,
        )
        self.waiting_requests = self._gauge("router_requests_waiting", "Requests held back for room.")
        self.cache_index_blocks = self._gauge(
            "cache_index_blocks", "KV blocks of which the router knows that a worker has them."
        )
        self.cache_index_bytes = self._gauge("cache_index_bytes", "Memory of what the router knows of them.")
        self._cache_news = self._counter("cache_news", "Messages of workers about what their caches hold.")
        self._cache_news_keys = self._counter("cache_news_keys", "KV blocks that these were about, of eight bytes each.")
        self.skipped_api_keys = self._gauge("api_keys_skipped", "Entries of the file of API keys that are wrong, and refused.")
        self.outdated_api_keys = self._gauge(
            "api_keys_outdated", "1 while the file of API keys can't be read and the keys that it had before count."
        )
        self.registry.register(_WorkerCollector(model_name, workers))

    def succeeded(self, finish_reason: str) -> None:
        """Count an answer that came to its end."""
        self._success.labels(self._model_name, finish_reason).inc()

    def failed(self, code: str) -> None:
        """Count a request that failed. `code` is an error's code, or `cancelled` for a client that went away."""
        self._errors.labels(self._model_name, code).inc()

    def decided(self, decision: str) -> None:
        """Count where a prompt was computed. `decision`: here, where it is decoded, or there, at a prefill worker."""
        self._decisions.labels(self._model_name, decision).inc()

    def inexact(self, reason: str) -> None:
        """Count a stream, once, that one arithmetic alone might not have made so. `reason`: mixed_kv (its prompt was computed
        under another name than its answer) or resumed (it went on under another name, or one that varies).
        """
        self._inexact_streams.labels(self._model_name, reason).inc()

    def cache_news(self, num_keys: int) -> None:
        """Count a message of a worker about so many cached blocks."""
        self._cache_news.inc()
        self._cache_news_keys.inc(num_keys)

    def migrated(self, reason: str, outcome: str) -> None:
        """Count a migration. `reason`: drain or balance. `outcome`: moved, full (no room at the target), failed, or cancelled
        (the stream ended).
        """
        self._migrations.labels(self._model_name, reason, outcome).inc()

    def copied(self, outcome: str) -> None:
        """Count a copy of a stream's KV. `outcome`: copied, full (no room anywhere else), failed, or cancelled (the stream
        ended).
        """
        self._copies.labels(self._model_name, outcome).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tandem:{name}", text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"tandem:{name}", text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"tandem:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        return family.labels(self._model_name)


class _WorkerCollector(Collector):
    def __init__(self, model_name: str, workers: WorkerSource) -> None:
        self._model_name = model_name
        self._workers = workers

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "worker", "role")
        samples = list(self._workers())
        for name, text, value in _WORKER_GAUGES:
            gauge = GaugeMetricFamily(f"tandem:{name}", text, labels=labels)
            for sample in samples:
                if sample.report is not None:
                    gauge.add_metric((self._model_name, sample.worker_id, sample.role.value), value(sample.report))
            yield gauge
        for name, text, count in _WORKER_COUNTERS:
            counter = CounterMetricFamily(f"tandem:{name}", text, labels=labels)
            for sample in samples:
                if sample.report is not None:
                    counter.add_metric((self._model_name, sample.worker_id, sample.role.value), count(sample.report))
            yield counter
        yield self._hits(samples)
        yield from self._tiers(samples)
        restarts = CounterMetricFamily("tandem:worker_restarts", "Times the worker was started anew.", labels=labels)
        for sample in samples:
            restarts.add_metric((self._model_name, sample.worker_id, sample.role.value), sample.restarts)
        yield restarts

    def _tiers(self, samples: Sequence[WorkerSample]) -> Iterator[Metric]:
        labels = ("model_name", "worker", "role", "tier")
        families: list[tuple[GaugeMetricFamily | CounterMetricFamily, str]] = [
            (GaugeMetricFamily(f"tandem:kv_tier_{name}", text, labels=labels), field) for name, text, field in _TIER_GAUGES
        ]
        families += [
            (CounterMetricFamily(f"tandem:kv_tier_{name}", text, labels=labels), field) for name, text, field in _TIER_COUNTERS
        ]
        for sample in samples:
            for tier in sample.report.tiers if sample.report is not None else ():
                values = (self._model_name, sample.worker_id, sample.role.value, tier.name)
                for family, field in families:
                    family.add_metric(values, getattr(tier, field))
        return iter([family for family, _ in families])

    def _hits(self, samples: Sequence[WorkerSample]) -> Metric:
        labels = ("model_name", "worker", "role", "source")
        hits = CounterMetricFamily(
            "tandem:prefix_cache_hits", "Prompt tokens that were not computed, by where their KV was.", labels=labels
        )
        for sample in samples:
            if sample.report is not None:
                for source, tokens in hits_by_source(sample.report).items():
                    hits.add_metric((self._model_name, sample.worker_id, sample.role.value, source), tokens)
        return hits


def kv_usage(report: LoadReport) -> float:
    """Share of the worker's KV blocks that are taken, from 0 to 1."""
    return 1.0 - report.free_blocks / report.total_blocks if report.total_blocks else 0.0


def hits_by_source(report: LoadReport) -> dict[str, int]:
    """Prompt tokens that the worker found in its own pool, and those that came from elsewhere."""
    brought = report.brought
    elsewhere = {"peer": brought.peer_tokens, "memory": brought.memory_tokens, "disk": brought.disk_tokens}
    return {"pool": report.prefix_cache_hits - brought.num_tokens} | elsewhere


_WORKER_GAUGES: tuple[tuple[str, str, Callable[[LoadReport], float]], ...] = (
    ("num_requests_running", "Sequences in the current batch.", lambda report: report.running),
    ("num_requests_waiting", "Requests that wait at the worker.", lambda report: report.waiting),
    ("kv_cache_usage_perc", "Share of KV blocks taken; 1 means all.", kv_usage),
    ("prefix_cache_blocks", "KV blocks in the prefix cache.", lambda report: report.cached_blocks),
    ("queued_prompt_tokens", "Prompt tokens not yet computed.", lambda report: report.queued_tokens),
    ("tickets", "Tickets not in a final state.", lambda report: report.tickets),
    ("kv_transfers_in_flight", "KV transfers under way.", lambda report: report.transfers),
    ("engine_busy_seconds", "Time spent in the engine since its start.", lambda report: report.busy_s),
    ("engine_steps", "Engine steps since its start.", lambda report: report.steps),
    ("engine_tokens", "Tokens computed (prefill) or generated (decode) since its start.", lambda report: report.tokens),
    ("engine_step_age_seconds", "How long the current step has been running.", lambda report: report.step_age_s),
)

_WORKER_COUNTERS: tuple[tuple[str, str, Callable[[LoadReport], int]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda report: report.prefix_cache_queries),
    ("prefix_cache_evictions", "Cached KV blocks given to something else.", lambda report: report.prefix_cache_evictions),
    ("lent_tokens", "Tokens whose KV other workers fetched from here.", lambda report: report.lent_tokens),
    ("failed_fetches", "Fetches from other workers that brought nothing.", lambda report: report.failed_fetches),
    ("num_preemptions", "Sequences that gave up their KV blocks to others.", lambda report: report.num_preemptions),
    ("recomputed_tokens", "Tokens computed again after a preemption.", lambda report: report.recomputed_tokens),
    ("prefilled_tokens", "Prompt tokens computed, at workers of either role.", lambda report: report.prefilled_tokens),
)

_TIER_GAUGES = (
    ("blocks", "KV blocks in the tier of the worker's node, whoever has written them.", "num_blocks"),
    ("bytes", "Bytes that they take.", "num_bytes"),
)

_TIER_COUNTERS = (
    ("stored_blocks", "KV blocks that the worker has written.", "stored"),
    ("evicted_blocks", "KV blocks that the worker has removed, since the tier was full.", "evicted"),
    ("damaged_blocks", "Files that the worker found damaged, and removed.", "damaged"),
    ("foreign_blocks", "Files of another model or version that the worker found, and removed.", "foreign"),
    ("failed_writes", "KV blocks that the worker could not write.", "failed_writes"),
    ("written_bytes", "Bytes of KV that the worker has written.", "bytes_written"),
    ("read_bytes", "Bytes of KV that the worker has read.", "bytes_read"),
)

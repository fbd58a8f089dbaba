"""What a router counts. Where vLLM measures the same thing its name is used, `vllm:` made `tandem:`.

Every series has the name of its router's place. In a cluster, the counts lie in files that all routers of the node read
(`telemetry.counts_folder`), so that any of them answers for all. Without such a folder, a `Metrics` owns its registry, and two
routers in one process don't share counts. What concerns workers is in `telemetry.cluster_metrics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from telemetry.api_keys import ApiKeyFile
from telemetry.cluster_metrics import ClusterCollector, ClusterSample, ClusterSource
from telemetry.counts_folder import CountsFolder
from telemetry.elsewhere import NOWHERE, Elsewhere, Merged

# vLLM's buckets (vllm/v1/metrics/loggers.py), in seconds.
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


MOST_TENANTS = 100
"""Tenants that have series of their own at one router."""
OTHERS = "(others)"
"""Stands for all further tenants. No tenant's name has parentheses."""
_LABELS = ("model_name", "router")


@dataclass(frozen=True)
class TenantCounts:
    """What one tenant has used."""

    prompt_tokens: Counter
    generation_tokens: Counter


class Metrics:
    """Counters and histograms of one router; the attributes are ready to use, labels bound."""

    def __init__(self, model_name: str, cluster: ClusterSource, folder: CountsFolder | None = None) -> None:
        """`cluster` is asked for workers whenever the metrics are read. `folder` has the counts of all routers."""
        self.registry = CollectorRegistry()
        self._whose = model_name, "router-0" if folder is None else folder.place
        self._model_name = model_name
        self._cluster = cluster
        self._counts: Collector = self.registry if folder is None else folder
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
        self.request_handoff_time = self._histogram(
            "request_handoff_time_seconds",
            "From the first token until the decode worker had the KV that another worker has computed.",
            _TTFT_BUCKETS,
        )
        self.request_decode_time = self._histogram(
            "request_decode_time_seconds", "From the first to the last token.", _REQUEST_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens given to clients.")
        self.resumed_streams = self._counter("resumed_streams", "Streams that went on elsewhere, or when a client came back.")
        self._inexact_streams = self._labelled(
            "inexact_streams",
            "Streams of several arithmetics: handed over to another (mixed_kv), or gone on under another or one that varies "
            "(resumed).",
            "reason",
        )
        self.kv_transfer_failures = self._counter("kv_transfer_failures", "KV caches that did not arrive whole.")
        self.workers_lost = self._counter("workers_lost", "Connections to workers that broke or fell silent.")
        self.usage_events_lost = self._counter("usage_events_lost", "Events for which the usage log had no room in time.")
        self.usage_events_waiting = self._gauge("usage_events_waiting", "Events that are not in the usage log yet.")
        self._success = self._labelled("request_success", "Requests that ended well.", "finished_reason")
        self._errors = self._labelled("request_errors", "Requests that ended in an error.", "code")
        self._decisions = self._labelled(
            "disaggregation_decisions",
            "Where prompts were computed: there (at a prefill worker) or here (where they are decoded).",
            "decision",
        )
        self.migration_pause = self._histogram(
            "migration_pause_seconds",
            "Gap between a moved stream's last output at one worker and its first at the next.",
            _ITL_BUCKETS,
        )
        text = "Moves of running streams to another decode worker."
        self._migrations = self._labelled("migrations", text, "reason", "outcome")
        self._copies = self._labelled("kv_copies", "Copies of running streams' KV at another decode worker.", "outcome")
        self.waiting_requests = self._gauge("router_requests_waiting", "Requests held back for room.")
        self._cache_index_blocks = self._gauge(
            "cache_index_blocks", "KV blocks of which the router knows that a worker has them."
        )
        self._cache_index_bytes = self._gauge("cache_index_bytes", "Memory of what the router knows of them.")
        self.cache_index_age = self._gauge(
            "cache_index_age_seconds", "How long the router has not known all that workers have; 0 while it does."
        )
        self._cache_news = self._counter("cache_news", "Messages of workers about what their caches hold.")
        self._cache_news_keys = self._counter("cache_news_keys", "KV blocks that these were about, of eight bytes each.")
        self.audit_leaks = self._gauge("audit_leaks", "What the router's latest audit has found leaking.")
        self._tenant_prompt_tokens = self._labelled(
            "tenant_prompt_tokens", "Prompt tokens of a tenant's requests that got a first token.", "tenant"
        )
        self._tenant_generation_tokens = self._labelled(
            "tenant_generation_tokens", "Tokens given to a tenant's clients.", "tenant"
        )
        self._tenants: dict[str, TenantCounts] = {}
        self.api_keys = ApiKeyFile(model_name)
        self._others: list[Collector] = [self.api_keys]
        for tenant in () if folder is None else folder.values_of(self._tenant_prompt_tokens, "tenant"):
            self.tenant(tenant)

    def tenant(self, tenant: str) -> TenantCounts:
        """The counts of a tenant, whose name is empty where callers have no keys."""
        counts = self._tenants.get(tenant)
        if counts is None:
            if len(self._tenants) >= MOST_TENANTS and tenant != OTHERS:
                return self.tenant(OTHERS)
            labels = *self._whose, tenant
            counts = TenantCounts(self._tenant_prompt_tokens.labels(*labels), self._tenant_generation_tokens.labels(*labels))
            self._tenants[tenant] = counts
        return counts

    def succeeded(self, finish_reason: str) -> None:
        """Count an answer that came to its end."""
        self._success.labels(*self._whose, finish_reason).inc()

    def failed(self, code: str) -> None:
        """Count a request that failed. `code` is an error's code, or `cancelled` for a client that went away."""
        self._errors.labels(*self._whose, code).inc()

    def decided(self, decision: str) -> None:
        """Count where a prompt was computed. `decision`: here, where it is decoded, or there, at a prefill worker."""
        self._decisions.labels(*self._whose, decision).inc()

    def inexact(self, reason: str) -> None:
        """Count a stream, once, that one arithmetic alone might not have made so. `reason`: mixed_kv (its prompt was computed
        under another name than its answer) or resumed (it went on under another name, or one that varies).
        """
        self._inexact_streams.labels(*self._whose, reason).inc()

    def cache_news(self, num_keys: int, num_blocks: int, num_bytes: int) -> None:
        """Count a message of a worker about so many cached blocks. The router knows of `num_blocks` now, in `num_bytes`."""
        self._cache_news.inc()
        self._cache_news_keys.inc(num_keys)
        self._cache_index_blocks.set(num_blocks)
        self._cache_index_bytes.set(num_bytes)

    def migrated(self, reason: str, outcome: str) -> None:
        """Count a migration. `reason`: drain, flip or balance. `outcome`: moved, full (no room at the target), failed, or
        cancelled (the stream ended).
        """
        self._migrations.labels(*self._whose, reason, outcome).inc()

    def copied(self, outcome: str) -> None:
        """Count a copy of a stream's KV. `outcome`: copied, full (no room anywhere else), failed, or cancelled (the stream
        ended).
        """
        self._copies.labels(*self._whose, outcome).inc()

    def show(self, collector: Collector) -> None:
        """Tell from now on what this collector tells, too."""
        self._others.append(collector)

    def sample(self) -> ClusterSample:
        """What is known of the cluster now, for `render`. To be called in the router's loop."""
        return self._cluster()

    def render(self, cluster: ClusterSample, elsewhere: Elsewhere = NOWHERE) -> bytes:
        """All metrics in Prometheus' text format. It reads files of all routers, and is to be called in a thread."""
        collectors = (ClusterCollector(self._model_name, cluster), self._counts, *self._others)
        families = chain.from_iterable(collector.collect() for collector in collectors)
        read = CollectorRegistry()
        read.register(Merged([*families, *elsewhere.families]))
        return generate_latest(read)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tandem:{name}", text, _LABELS, registry=self.registry).labels(*self._whose)

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tandem:{name}", text, (*_LABELS, *labels), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(f"tandem:{name}", text, _LABELS, registry=self.registry, multiprocess_mode="livesum")
        return family.labels(*self._whose)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"tandem:{name}", text, _LABELS, registry=self.registry, buckets=buckets)
        return family.labels(*self._whose)

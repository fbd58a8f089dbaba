"""The metrics of workers and pools, read when Prometheus asks: from the latest load reports and the view of the cluster.

Every router knows all workers, so whichever is asked has all of these, each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.cluster_view import AutoscalerState, RolloutPhase, RolloutState, WorkerState
from protocol.messages.load import LoadReport
from protocol.messages.workers import Duty, Role


@dataclass(frozen=True)
class WorkerSample:
    """What is known of one worker when the metrics are read. `report` is None until its first one arrives."""

    worker_id: str
    duty: Duty
    state: WorkerState
    restarts: int
    term: int
    """How often its life has changed its role."""
    report: LoadReport | None
    leaves: bool = False
    """Whether the worker's node will go."""
    revision: int = 1


@dataclass(frozen=True)
class ClusterSample:
    """What a router knows of the cluster when the metrics are read."""

    workers: Sequence[WorkerSample] = ()
    wanted: Mapping[Role, int] = field(default_factory=dict)
    """How many workers of each role there should be."""
    autoscaler: AutoscalerState | None = None
    rollout: RolloutState | None = None


ClusterSource = Callable[[], ClusterSample]


class ClusterCollector(Collector):
    """The families of all workers and of both pools."""

    def __init__(self, model_name: str, cluster: ClusterSample) -> None:
        self._model_name = model_name
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        """Return all families of metrics about the cluster's workers."""
        cluster = self._cluster
        yield from self._pools(cluster)
        if cluster.autoscaler is not None:
            yield from self._autoscaler(cluster.autoscaler)
        if cluster.rollout is not None:
            yield from self._rollout(cluster.rollout, cluster.workers)
        labels = ("model_name", "worker", "role")
        reports = [(self._of(sample), sample.report) for sample in cluster.workers if sample.report is not None]
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"tandem:{name}", text, labels=labels)
            for whose, report in reports:
                gauge.add_metric(whose, value(report))
            yield gauge
        for name, text, count in _COUNTERS:
            counter = CounterMetricFamily(f"tandem:{name}", text, labels=labels)
            for whose, report in reports:
                counter.add_metric(whose, count(report))
            yield counter
        yield _hits(reports)
        yield from _TIERS.families(reports)
        yield from _GPUS.families(reports)
        restarts = CounterMetricFamily("tandem:worker_restarts", "Times the worker was started anew.", labels=labels)
        for sample in cluster.workers:
            restarts.add_metric(self._of(sample), sample.restarts)
        yield restarts
        flips = CounterMetricFamily("tandem:role_flips", "Times the worker has changed its role.", labels=labels[:2])
        for sample in cluster.workers:
            flips.add_metric(self._of(sample)[:2], sample.term)
        yield flips

    def _of(self, sample: WorkerSample) -> tuple[str, ...]:
        """A worker on standby does nothing yet, so it is not among those of the role that it would begin with."""
        role = WorkerState.STANDBY.value if sample.state is WorkerState.STANDBY else sample.duty.value
        return self._model_name, sample.worker_id, role

    def _autoscaler(self, state: AutoscalerState) -> Iterator[Metric]:
        labels = ("model_name",)
        decisions = CounterMetricFamily(
            "tandem:autoscaler_decisions",
            "Decisions of the autoscaler that gave a role more workers (up) or fewer (down).",
            labels=("model_name", "role", "direction"),
        )
        for changes in state.changes:
            decisions.add_metric((self._model_name, changes.role.value, "up"), changes.up)
            decisions.add_metric((self._model_name, changes.role.value, "down"), changes.down)
        paused = GaugeMetricFamily(
            "tandem:autoscaler_paused", "1 while an operator's word keeps it from deciding.", labels=labels
        )
        paused.add_metric((self._model_name,), float(state.paused is not None))
        return iter((decisions, paused))

    def _rollout(self, state: RolloutState, workers: Sequence[WorkerSample]) -> Iterator[Metric]:
        share = GaugeMetricFamily(
            "tandem:rollout_share", "Share of new requests that go to workers of a new configuration.", labels=("model_name",)
        )
        share.add_metric((self._model_name,), state.share)
        yield share
        phase = GaugeMetricFamily("tandem:rollout_phase", "1 for where the latest rollout is.", labels=("model_name", "phase"))
        for each in RolloutPhase:
            phase.add_metric((self._model_name, each.value), float(each is state.phase))
        yield phase
        there = GaugeMetricFamily(
            "tandem:rollout_workers", "Number of workers, by the revision of their configuration.", labels=_OF_REVISIONS
        )
        for (role, revision), number in sorted(Counter((each.duty.role.value, str(each.revision)) for each in workers).items()):
            there.add_metric((self._model_name, role, revision), number)
        yield there

    def _pools(self, cluster: ClusterSample) -> Iterator[Metric]:
        wanted = GaugeMetricFamily(
            "tandem:workers_wanted", "Number of workers that there should be.", labels=("model_name", "role")
        )
        there = GaugeMetricFamily("tandem:workers", "Number of workers, by state.", labels=("model_name", "role", "state"))
        leaving = GaugeMetricFamily(
            "tandem:workers_leaving", "Number of workers whose node will go.", labels=("model_name", "role")
        )
        numbers = Counter((sample.duty.role, sample.state) for sample in cluster.workers)
        going = Counter(sample.duty.role for sample in cluster.workers if sample.leaves)
        for role, number in cluster.wanted.items():
            wanted.add_metric((self._model_name, role.value), number)
            leaving.add_metric((self._model_name, role.value), going[role])
            for state in WorkerState:
                there.add_metric((self._model_name, role.value, state.value), numbers[role, state])
        yield wanted
        yield there
        yield leaving


_OF_REVISIONS = ("model_name", "role", "revision")

_Reports = Sequence[tuple[tuple[str, ...], LoadReport]]
"""The labels of each worker, and its latest report."""


@dataclass(frozen=True)
class _Part:
    """What a worker has several of, such as tiers: each has a value of a label, and samples of its own."""

    prefix: str
    """Beginning of the families' names."""
    label: str
    gauges: Sequence[tuple[str, str, str]]
    """Of each: the rest of its name, its help, and the attribute that holds its value."""
    counters: Sequence[tuple[str, str, str]]
    of: Callable[[LoadReport], Sequence[tuple[str, object]]]
    """The parts of a worker, by their values of the label."""

    def families(self, reports: _Reports) -> Sequence[Metric]:
        """All families, with a sample for each part that has the value."""
        labels = ("model_name", "worker", "role", self.label)
        families: list[tuple[GaugeMetricFamily | CounterMetricFamily, str]] = [
            (GaugeMetricFamily(f"{self.prefix}{name}", text, labels=labels), attribute) for name, text, attribute in self.gauges
        ]
        families += [
            (CounterMetricFamily(f"{self.prefix}{name}", text, labels=labels), attribute)
            for name, text, attribute in self.counters
        ]
        for whose, report in reports:
            for which, part in self.of(report):
                for family, attribute in families:
                    if (value := getattr(part, attribute)) is not None:
                        family.add_metric((*whose, which), value)
        return [family for family, _ in families]


def _hits(reports: _Reports) -> Metric:
    labels = ("model_name", "worker", "role", "source")
    hits = CounterMetricFamily(
        "tandem:prefix_cache_hits", "Prompt tokens that were not computed, by where their KV was.", labels=labels
    )
    for whose, report in reports:
        for source, tokens in hits_by_source(report).items():
            hits.add_metric((*whose, source), tokens)
    return hits


def hits_by_source(report: LoadReport) -> dict[str, int]:
    """Prompt tokens that the worker found in its own pool, and those that came from elsewhere."""
    brought = report.brought
    elsewhere = {"peer": brought.peer_tokens, "memory": brought.memory_tokens, "disk": brought.disk_tokens}
    return {"pool": report.prefix_cache_hits - brought.num_tokens} | elsewhere


_GAUGES: tuple[tuple[str, str, Callable[[LoadReport], float]], ...] = (
    ("num_requests_running", "Sequences in the current batch.", lambda report: report.running),
    ("num_requests_waiting", "Requests that wait at the worker.", lambda report: report.waiting),
    ("kv_cache_usage_perc", "Share of KV blocks taken; 1 means all.", lambda report: report.kv_usage),
    ("prefix_cache_blocks", "KV blocks in the prefix cache.", lambda report: report.cached_blocks),
    ("queued_prompt_tokens", "Prompt tokens not yet computed.", lambda report: report.queued_tokens),
    ("tickets", "Tickets not in a final state.", lambda report: report.tickets),
    ("kv_transfers_in_flight", "KV transfers under way.", lambda report: report.transfers),
    ("engine_step_age_seconds", "How long the current step has been running.", lambda report: report.step_age_s),
)

_COUNTERS: tuple[tuple[str, str, Callable[[LoadReport], float]], ...] = (
    (
        "engine_busy_seconds",
        "Time spent in the engine: its rate is how busy it is.",
        lambda report: report.busy_s,
    ),
    ("engine_steps", "Engine steps.", lambda report: report.steps),
    ("engine_tokens", "Tokens computed (prefill) or generated (decode).", lambda report: report.tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda report: report.prefix_cache_queries),
    ("prefix_cache_evictions", "Cached KV blocks given to something else.", lambda report: report.prefix_cache_evictions),
    ("lent_tokens", "Tokens whose KV other workers fetched from here.", lambda report: report.lent_tokens),
    ("lent_bytes", "Bytes of KV that other workers fetched from here.", lambda report: report.lent_bytes),
    (
        "kv_transfer_sent_bytes",
        "Bytes of KV sent to other workers: handed over, moved, copied or lent.",
        lambda report: report.sent_bytes,
    ),
    ("failed_fetches", "Fetches from other workers that brought nothing.", lambda report: report.failed_fetches),
    ("num_preemptions", "Sequences that gave up their KV blocks to others.", lambda report: report.num_preemptions),
    ("recomputed_tokens", "Tokens computed again after a preemption.", lambda report: report.recomputed_tokens),
    ("spec_decode_num_draft_tokens", "Tokens guessed for streams, and verified.", lambda report: report.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Tokens guessed for streams that were right.", lambda report: report.accepted_tokens),
    ("prefilled_tokens", "Prompt tokens computed, at workers of either role.", lambda report: report.prefilled_tokens),
)

_TIERS = _Part(
    "tandem:kv_tier_",
    "tier",
    gauges=(
        ("blocks", "KV blocks in the tier of the worker's node, whoever has written them.", "num_blocks"),
        ("bytes", "Bytes that they take.", "num_bytes"),
    ),
    counters=(
        ("stored_blocks", "KV blocks that the worker has written.", "stored"),
        ("evicted_blocks", "KV blocks that the worker has removed, since the tier was full.", "evicted"),
        ("damaged_blocks", "Files that the worker found damaged, and removed.", "damaged"),
        ("foreign_blocks", "Files of another model or version that the worker found, and removed.", "foreign"),
        ("failed_writes", "KV blocks that the worker could not write.", "failed_writes"),
        ("written_bytes", "Bytes of KV that the worker has written.", "bytes_written"),
        ("read_bytes", "Bytes of KV that the worker has read.", "bytes_read"),
    ),
    of=lambda report: [(tier.name, tier) for tier in report.tiers],
)

_GPUS = _Part(
    "tandem:gpu_",
    "gpu",
    gauges=(
        ("utilization", "Share of the time in which the worker's GPU computed something, from 0 to 1.", "utilization"),
        ("memory_used_bytes", "Memory of the worker's GPU that is taken, also by others.", "memory_used_bytes"),
        ("memory_total_bytes", "All memory of the worker's GPU.", "memory_total_bytes"),
        ("temperature_celsius", "Temperature of the worker's GPU.", "temperature_c"),
        ("power_watts", "Power that the worker's GPU draws.", "power_w"),
        ("latest_xid", "Number of the GPU's latest XID error since the worker's start; 0 if there was none.", "latest_xid"),
    ),
    counters=(
        (
            "ecc_uncorrected_errors",
            "Memory errors of the worker's GPU that ECC could not correct, since its driver was loaded.",
            "ecc_uncorrected",
        ),
    ),
    of=lambda report: [(gpu.uuid, gpu) for gpu in report.gpus],
)

"""The sums of the usage log in `/metrics`: the owner of the log leaves them in the counts folder, where all routers read them.

The file is replaced as a whole before an event is acknowledged, and says what the ledger says. So the metrics are the sums of
the log at any time, whichever router is asked, and whoever was killed meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from telemetry.usage.ledger import UsageLedger
from telemetry.usage.replacing import replace_file

TOTALS = "usage.json"
"""The name of the file in the counts folder."""
_TOKENS = (
    ("prompt_tokens", "usage_prompt_tokens", "Prompt tokens in the usage log, cached ones among them."),
    ("cached_tokens", "usage_cached_tokens", "Prompt tokens in the usage log that need not be computed."),
    ("answer_tokens", "usage_generation_tokens", "Tokens of answers in the usage log."),
)


@dataclass(frozen=True)
class KafkaState:
    """What is known of the messages to Kafka."""

    lag: int
    """Lines that were not delivered yet."""
    delivered: int
    """Lines that were delivered since the keeper of the log has started."""
    lost: int
    """Lines that were removed with their file before they were delivered, ever."""
    failures: int
    """Batches that were not delivered, and are sent again."""


def write_totals(path: Path, ledger: UsageLedger, kafka: KafkaState | None) -> None:
    """Replace the file. Raises OSError if that fails."""
    totals = {model: {tenant: each.as_json() for tenant, each in tenants.items()} for model, tenants in ledger.totals.items()}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shown = {"totals": totals, "kafka": None if kafka is None else asdict(kafka)}
    replace_file(path, json.dumps(shown, separators=(",", ":")).encode(), sync=False)


class UsageTotals(Collector):
    """The families of the usage log."""

    def __init__(self, path: Path) -> None:
        """`path` is the file, which is read at each look. Without one, there are no samples."""
        self._path = path

    def collect(self) -> Iterator[Metric]:
        """Return all families of metrics about usage."""
        try:
            found: dict[str, Any] = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            found = {"totals": {}, "kafka": None}
        rows = [(model, tenant, sums) for model, tenants in found["totals"].items() for tenant, sums in tenants.items()]
        events = CounterMetricFamily(
            "tandem:usage_events", "Lines of the usage log, each of a request.", labels=("model_name", "tenant", "outcome")
        )
        for model, tenant, sums in rows:
            for outcome, number in sums["events"].items():
                events.add_metric((model, tenant, outcome), number)
        yield events
        for field, name, text in _TOKENS:
            family = CounterMetricFamily(f"tandem:{name}", text, labels=("model_name", "tenant"))
            for model, tenant, sums in rows:
                family.add_metric((model, tenant), sums[field])
            yield family
        if found["kafka"] is not None:
            yield from _of_kafka(KafkaState(**found["kafka"]))


def _of_kafka(state: KafkaState) -> Iterator[Metric]:
    yield GaugeMetricFamily("tandem:usage_kafka_lag_events", "Lines of the usage log that Kafka has not got yet.", state.lag)
    yield CounterMetricFamily("tandem:usage_kafka_delivered_events", "Lines that Kafka has confirmed.", state.delivered)
    text = "Lines that the log's bound has removed before Kafka had them."
    yield CounterMetricFamily("tandem:usage_kafka_lost_events", text, state.lost)
    text = "Batches of lines that Kafka did not confirm in time, and that are sent again."
    yield CounterMetricFamily("tandem:usage_kafka_failed_batches", text, state.failures)

"""What the configuration says of the usage log, for its owner; and whether that can work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import TelemetryConfig
from telemetry.usage.book import LogBounds
from telemetry.usage.log_files import check_usage_log

if TYPE_CHECKING:
    from telemetry.usage.kafka_feed import KafkaTarget

_MIB = 1024 * 1024


@dataclass(frozen=True)
class UsageSettings:
    """Where the usage log lies, how large it may become, and where its lines go besides."""

    path: Path
    bounds: LogBounds
    kafka: KafkaTarget | None


def usage_settings(telemetry: TelemetryConfig) -> UsageSettings | None:
    """Return what the configuration says. None means that nobody wants a usage log."""
    if telemetry.usage_log is None:
        return None
    kafka = None
    if telemetry.usage_kafka is not None:
        from telemetry.usage.kafka_feed import KafkaTarget

        kafka = KafkaTarget.of(telemetry.usage_kafka, telemetry.usage_kafka_options)
    bounds = LogBounds(int(telemetry.usage_log_file_mib * _MIB), telemetry.usage_log_files)
    return UsageSettings(Path(telemetry.usage_log), bounds, kafka)


def check_usage(telemetry: TelemetryConfig) -> None:
    """Raise ConfigError if the log can't be written, or is another cluster's, or if its lines could not be sent to Kafka."""
    settings = usage_settings(telemetry)
    if settings is None:
        return
    check_usage_log(settings.path)
    if settings.kafka is not None:
        from telemetry.usage.kafka_feed import check_kafka

        check_kafka(settings.kafka)

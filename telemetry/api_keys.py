"""The file of API keys in `/metrics`. All routers of a node read the same file, so the one that is asked tells of it alone.

It has no part in the counts folder: what another router has read may be long mended.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ApiKeyFile(Collector):
    """The families of the file of API keys. Without a file, nothing is wrong with it."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._num_skipped = 0
        self._is_outdated = False

    def note(self, num_skipped: int, *, outdated: bool) -> None:
        """Take what this router knows of the file now: how many entries are skipped, and whether it can't be read."""
        self._num_skipped, self._is_outdated = num_skipped, outdated

    def collect(self) -> Iterator[Metric]:
        """Return what was noted last."""
        yield self._gauge("api_keys_skipped", "Entries of the file of API keys that are wrong, and refused.", self._num_skipped)
        yield self._gauge(
            "api_keys_outdated",
            "1 while the file of API keys can't be read and the keys that it had before count.",
            self._is_outdated,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tandem:{name}", text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

"""What a load test is asked to do: `tandem bench`'s flags, checked together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from loadtest import metrics
from loadtest.datasets import NAMES, TRACES
from loadtest.server import Backend
from protocol.errors import InvalidRequestError


@dataclass(frozen=True)
class BenchOptions:
    """Raises InvalidRequestError, naming the flag, for values that can't work or don't go together."""

    base_url: str
    api_key: str | None
    backend: Backend
    endpoint: str
    model: str | None
    dataset_name: str
    dataset_path: Path | None
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    random_prefix_len: int
    sharegpt_output_len: int | None
    length_scale: float
    time_scale: float | None
    """None: arrivals by `request_rate`; else a trace's own."""
    num_prompts: int
    num_warmups: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    ignore_eos: bool
    seed: int
    percentile_metrics: tuple[str, ...]
    metric_percentiles: tuple[float, ...]
    goodput: dict[str, float]
    """Milliseconds by metric."""
    timeout_s: float

    def __post_init__(self) -> None:
        self._check(self.dataset_name in NAMES, f"dataset-name is one of {', '.join(NAMES)}", "dataset_name")
        needs_file = self.dataset_name != "random"
        self._check(
            not needs_file or self.dataset_path is not None, f"{self.dataset_name} needs --dataset-path", "dataset_path"
        )
        self._check(needs_file or self.dataset_path is None, "--dataset-path is not for random prompts", "dataset_path")
        is_trace = self.dataset_name in TRACES
        self._check(is_trace or self.time_scale is None, "--time-scale is for traces, which have times", "time_scale")
        self._check(is_trace or self.length_scale == 1.0, "--length-scale is for traces", "length_scale")
        both = self.time_scale is not None and not math.isinf(self.request_rate)
        self._check(not both, "--time-scale takes the trace's own times: leave --request-rate out", "request_rate")
        self._check(self.num_prompts >= 1, "num-prompts must be at least 1", "num_prompts")
        self._check(self.num_warmups >= 0, "num-warmups must be at least 0", "num_warmups")
        self._check(
            self.max_concurrency is None or self.max_concurrency >= 1, "max-concurrency must be at least 1", "max_concurrency"
        )
        self._check(self.seed >= 0, "seed must be at least 0", "seed")
        self._check(self.timeout_s > 0, "timeout must be over 0", "timeout")
        self._check(self.endpoint.startswith("/"), "endpoint is a path, such as /v1/completions", "endpoint")

    @staticmethod
    def _check(right: bool, sentence: str, param: str) -> None:
        if not right:
            raise InvalidRequestError(sentence, param=param)

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        """Those that were asked for and, behind a limit on concurrency, what the wait for it makes of them."""
        if self.max_concurrency is None:
            return self.percentile_metrics
        planned = (f"planned_{name}" for name in self.percentile_metrics)
        return tuple(dict.fromkeys((*self.percentile_metrics, *(name for name in planned if name in metrics.METRICS))))

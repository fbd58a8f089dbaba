"""The first minutes of Mooncake's conversations on 16 prefill and 16 decode workers, as they are measured and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.quantiles import quantile
from configs.paced.profile import DEFAULT_PROFILE, load_paced_profile
from loadtest.datasets import TraceRow, mooncake_rows

WORKERS = 16
"""Number of workers of each role."""
MINUTES = 15.0
TRACE = "mooncake_conversation.jsonl"
TPOT_S = 0.05
_SLOW = 2.0


def conversations(path: Path, minutes: float) -> list[TraceRow]:
    """The requests of the first minutes of the trace."""
    return [row for row in mooncake_rows(path) if row.arrival_s is not None and row.arrival_s < minutes * 60]


def limit_s(rows: Sequence[TraceRow]) -> float:
    """Seconds within which a first token is in time: twice the p90 of requests that are alone."""
    return _SLOW * quantile([_alone_s(row) for row in rows], 0.9)


def _alone_s(row: TraceRow) -> float:
    """Seconds to the first token of a request that is alone, of which nothing is cached, by the profile."""
    profile = load_paced_profile(DEFAULT_PROFILE)
    step = profile.sizes.max_batch_tokens
    chunks = ((start, min(step, row.input_len - start)) for start in range(0, row.input_len, step))
    return sum(profile.prefill_s([chunk]) for chunk in chunks)

"""Quantiles as all benchmarks count them."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float = 0.99) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

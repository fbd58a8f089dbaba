"""A paced cluster and a simulated one are asked the same, at rates that follow from the profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.paced_simulation import SECONDS, rate_of, slower, summary, table
from configs.paced.profile import DEFAULT_PROFILE, load_paced_profile
from simulator.cluster import Shape


def test_a_slower_machine_takes_longer_for_everything() -> None:
    fast = load_paced_profile(DEFAULT_PROFILE)
    slow = slower(fast, 8.0)
    assert slow.prefill_s([(0, 2048)]) == pytest.approx(8 * fast.prefill_s([(0, 2048)]))
    assert slow.decode_s(16, 1000) == pytest.approx(8 * fast.decode_s(16, 1000))
    assert slow.link_bytes_per_s == fast.link_bytes_per_s / 8


def test_rates_keep_prefill_workers_busy_for_their_share(tmp_path: Path) -> None:
    trace = tmp_path / "code.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:{n // 60:02d}:{n % 60:02d}.0000000,2048,8" for n in range(1000)]
    trace.write_text("\n".join(lines) + "\n")
    paced = load_paced_profile(DEFAULT_PROFILE)
    rate, num_prompts = rate_of(Shape(4, 4), 0.5, trace, paced)
    assert rate * paced.prefill_s([(0, 2048)]) == pytest.approx(0.5 * 4)
    assert num_prompts == round(rate * SECONDS)


def test_times_stand_beside_each_other() -> None:
    measured = summary([(0.5, 0.05), (0.7, None), (0.6, 0.06)])
    assert (measured["ttft_p50"], measured["ttft_p90"]) == (600.0, 700.0), "the middle and the largest of three"
    row = {"shape": "2P2D", "busy": 0.5, "rate": 1.5, "requests": 3, "measured": measured, "simulated": summary([(1.0, 0.1)])}
    assert "| 2P2D | 50% | 1.50 | 3 | 600 / 1000 | 700 / 1000 | 50 / 100 | 60 / 100 |" in table([row])

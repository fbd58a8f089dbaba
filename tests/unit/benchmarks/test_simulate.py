"""What was measured is simulated run by run: the same prompts at the same rates, judged in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.goodput import seed_of
from benchmarks.lib.slo import HIGHEST_STEP, LOWEST_STEP, SLOS, rate_of
from benchmarks.simulate import compared, like, table, workload_of
from configs.loader import load_config
from simulator.profile import LAPTOP, Profile

NONE = Path("/nowhere")


def entry(*steps: int, last_good: int) -> dict[str, Any]:
    runs = [
        {"step": step, "rate": rate_of(step), "sent": 20, "met": {slo.name: 20 if step <= last_good else 0 for slo in SLOS}}
        for step in steps
    ]
    return {"workload": "200-in-200-out", "seed": 1, "runs": runs}


def test_every_run_is_simulated_and_judged_like_the_real_one() -> None:
    real = entry(-24, 72, last_good=0)
    made_up = like(real, NONE, load_config(None, {}), Profile.load(LAPTOP))
    assert [(run["step"], run["sent"]) for run in made_up["runs"]] == [(-24, 20), (72, 20)]
    quiet, flooded = made_up["runs"]
    assert quiet["met"]["1000/60 x 2"] == 20
    assert flooded["met"]["500/30 x 0.5"] < 18
    [row, *_] = compared("200-in-200-out", [real], [made_up])
    assert row["measured"] == rate_of(-24)
    assert row["ratio"] == row["simulated"] / row["measured"]
    assert "| 200-in-200-out | 1P1D | 500 / 30 ms | 1 | 0.50 |" in table([row])


def test_a_rate_that_was_nowhere_good_has_no_ratio() -> None:
    bad = entry(0, last_good=-1)
    assert compared("200-in-200-out", [bad], [bad]) == []
    assert compared("200-in-200-out", [], []) == []


def test_each_rate_and_seed_has_its_own_prompts() -> None:
    seeds = {seed_of(seed, step) for seed in range(3) for step in range(LOWEST_STEP, HIGHEST_STEP)}
    assert len(seeds) == 3 * (HIGHEST_STEP - LOWEST_STEP)
    first, again, other = (workload_of("200-in-200-out", NONE, 5, seed).at_rate(2.0) for seed in (1, 1, 2))
    assert [request.arrival for request in first] == [request.arrival for request in again]
    assert first[0].token_ids == again[0].token_ids != other[0].token_ids
    assert {len(request.token_ids) for request in first} == {200} == {request.output_len for request in first}
    with pytest.raises(KeyError):
        workload_of("unknown", NONE, 5, 1)

"""The benchmark of large clusters, with a small one: it uses simulator and supervisor as nothing else does."""

from __future__ import annotations

import asyncio

from benchmarks.scale import simulated, supervised


def test_every_request_of_a_simulated_cluster_ends_and_choices_are_timed() -> None:
    row = simulated(workers=4, num=200)
    assert (row["answered"], row["refused"]) == (200, 0)
    assert 0 < row["choice_us_p50"] <= row["choice_us_p99"]
    assert 0 < row["change_us_p50"] <= row["change_us_p99"]


def test_all_workers_of_a_supervised_cluster_come_up() -> None:
    assert asyncio.run(supervised(workers=4)).keys() == {"start_ms", "view_us"}

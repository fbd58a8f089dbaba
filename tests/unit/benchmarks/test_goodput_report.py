"""What is known of goodput is kept, joined with what is new, and shown as far as it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.goodput_report import by_workload, draw, goodputs, merge, picture_name, table
from benchmarks.lib.slo import SLOS, STEPS_PER_DOUBLING, rate_of

Key = tuple[str, str, int]
KEYS: st.SearchStrategy[Key] = st.tuples(st.sampled_from(["code", "chat"]), st.sampled_from(["a", "b"]), st.integers(0, 2))


def entry(key: Key, mark: int = 0, last_good: int = 0) -> dict[str, Any]:
    workload, system, seed = key
    steps = (last_good, last_good + 1)
    runs = [
        {
            "step": step,
            "rate": rate_of(step),
            "sent": 20,
            "requests_per_s": 1.5,
            "output_tokens_per_s": 100.0 + mark,
            "met": {slo.name: 20 if step <= last_good else 0 for slo in SLOS},
        }
        for step in steps
    ]
    facts = {"prompts": "some", "seconds": 10.0, "load_average": 0.1, "environment": {"commit": "abc"}, "mark": mark}
    return {"workload": workload, "system": system, "seed": seed, "runs": runs, **facts}


@given(st.lists(KEYS))
def test_the_newest_of_each_is_kept_and_nothing_else_is_lost(keys: list[Key]) -> None:
    known: list[dict[str, Any]] = []
    for mark, key in enumerate(keys):
        known = json.loads(json.dumps(merge(known, entry(key, mark))))
    newest = {key: mark for mark, key in enumerate(keys)}
    assert {(each["workload"], each["system"], each["seed"]): each["mark"] for each in known} == newest
    assert len(known) == len(newest)
    assert merge(known, known[0]) == known if known else True


@given(st.lists(KEYS, min_size=1, unique=True))
def test_any_part_of_the_results_has_a_table(keys: list[Key]) -> None:
    known: list[dict[str, Any]] = []
    for key in keys:
        known = merge(known, entry(key, last_good=STEPS_PER_DOUBLING))
    shown = table("goodput_here", known, {"a": "one", "b": "two"})
    for workload, systems in by_workload(known).items():
        assert f"## {workload}\n" in shown
        assert picture_name("goodput_here", workload) in shown
        for seeds in systems.values():
            assert goodputs(seeds, SLOS[0]) == [2.0] * len(seeds)
    assert "times the best peer" not in shown


def test_ours_is_compared_with_the_best_peer() -> None:
    rates = {"tandem": 2, "tandem-colocated:128": 3, "vllm:128": 1, "llama.cpp": 0}
    known = [entry(("chat", system, 0), last_good=doublings * STEPS_PER_DOUBLING) for system, doublings in rates.items()]
    shown = table("goodput_here", known, {})
    assert "| tandem, times the best peer | 2.00 | 2.00 | 2.00 |" in shown
    assert "| tandem-colocated:128, times the best peer | 4.00 | 4.00 | 4.00 |" in shown
    assert "| tandem | 4.00 (4.00 to 4.00; below 4.12)" in shown


def test_a_workload_has_a_picture(tmp_path: Path) -> None:
    known = [entry(("chat", system, 0)) for system in ("tandem", "vllm")]
    draw(tmp_path / "chat.png", "chat", by_workload(known)["chat"])
    assert (tmp_path / "chat.png").read_bytes().startswith(b"\x89PNG")

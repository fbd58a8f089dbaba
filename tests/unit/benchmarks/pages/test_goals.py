"""Goals: each once, with figures and tests that there are, and with what is missing."""

from __future__ import annotations

from collections import Counter

from benchmarks.lib.environment import ROOT
from benchmarks.pages.aim import Aim
from benchmarks.pages.aims import AIMS
from benchmarks.pages.goals import Row, missed, rows_of, state_of, summary, tables
from benchmarks.pages.reasons import REASONS, UNKNOWN, reason
from benchmarks.pages.results import KINDS, Result, owner, read_results
from benchmarks.suite.catalogue import PARTS

RESULTS = read_results()
ALL = [aim for group in AIMS.values() for aim in group]
ENVIRONMENT = {"processor": "A processor (avx2)", "cores": 2, "commit": "a9b2d9748a78"}


def overhead(kind: str, us: float, ms: float) -> Result:
    name = f"overhead_{kind}"
    data = {"cpu_per_token": [{"us_per_token": us}], "first_token": {"extra_ms": ms}, "environment": ENVIRONMENT}
    return Result(name, *owner(name), data)


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).exists() and (not name or f"def {name}(" in (ROOT / file).read_text())


def test_a_figure_with_a_goal_is_in_one_goal() -> None:
    known = {(result.name, figure.name) for result in RESULTS for figure in result.figures if figure.goal}
    named = Counter(
        (row.result.name, row.figure.name) for aim in ALL for row in rows_of(aim, RESULTS) if row.result and row.figure
    )
    assert [each for each, times in named.items() if times > 1] == []
    elsewhere = {
        "cut_streams",
        "guidellm",
        "api_cases",
        "simulate",
        "paced_simulation",
        "paced_kills",
    }  # checks without a goal of an issue
    assert {name for name, _ in known - named.keys()} <= elsewhere


def test_a_goal_has_figures_or_tests_or_a_reason() -> None:
    assert len({aim.text for aim in ALL}) == len(ALL)
    for aim in ALL:
        assert aim.figures or aim.tests or aim.absent, aim.text
        assert [test for test in aim.tests if not is_there(test)] == []
        for result, _ in aim.figures:
            assert any(part.result == result for part in PARTS), result


def test_tests_are_looked_up_by_name() -> None:
    here = "tests/unit/benchmarks/pages/test_goals.py"
    assert is_there(here)
    assert is_there(f"{here}::test_tests_are_looked_up_by_name")
    assert not is_there(f"{here}::test_that_is_none")
    assert not is_there("tests/unit/benchmarks/pages/test_none.py")


def test_what_was_not_measured_is_a_row() -> None:
    aim = Aim("TTFT", (("overhead", "TTFT above"), ("overhead", "processor time")))
    rows = rows_of(aim, [overhead("avx512_bf16", 100.0, 9.0)])
    assert [(row.where, row.figure is None) for row in rows] == 2 * [(KINDS["avx512_bf16"], False), (KINDS["amx"], True)]
    assert rows_of(aim, []) == 2 * [Row(where) for where in KINDS.values()]
    assert rows_of(Aim("x", (("scale", "simulated"),)), []) == [Row("any processor")]


def test_a_goal_of_one_kind_of_processor_has_no_rows_of_others() -> None:
    aim = Aim("TTFT", (("overhead", "TTFT above"),), kind="avx2")
    results = [overhead("avx512_bf16", 100.0, 9.0), overhead("avx2", 100.0, 9.0)]
    assert [(row.where, row.result) for row in rows_of(aim, results)] == [("any with AVX2", results[1])]
    assert rows_of(aim, results[:1]) == [Row("any with AVX2")]


def test_a_goal_is_met_only_if_all_of_its_figures_are() -> None:
    aim = Aim("TTFT", (("overhead", "TTFT above"), ("overhead", "processor time")))
    good, bad = overhead("avx512_bf16", 100.0, 1.0), overhead("amx", 100.0, 9.0)
    assert state_of(aim, [good]) == "met"
    assert state_of(aim, [good, bad]) == "missed"
    assert state_of(aim, []) == "unknown"
    assert state_of(Aim("x", tests=("tests/x.py",)), [good, bad]) == "tested"
    aims = {"Speed": [aim, Aim("x", tests=("tests/x.py",)), Aim("y", absent="No result.")]}
    assert summary([good], aims) == (
        "Of 3 goals 1 are met wherever they were measured, 0 are missed somewhere, 0 are to measure and were measured, "
        "1 are kept by tests alone, 1 are without result or test. "
        "Of those that tests keep, 0 have a remark on what is missing. 1 have no figure on Intel with AMX."
    )
    assert "keep, 1 have a remark" in summary([], {"Speed": [Aim("x", tests=("tests/x.py",), absent="Not y.")]})


def test_a_goal_of_measuring_is_reached_by_a_figure_without_a_bound() -> None:
    name = "early_exit_avx512_bf16"
    exits = next(result for result in RESULTS if result.name == name)
    aim = Aim("Early exit: where it pays is measured", (("early_exit", "predicted gain"),))
    assert state_of(aim, [exits]) == "measured"
    assert state_of(aim, []) == "unknown"
    assert summary([exits], {"Guesses": [aim]}).startswith(
        "Of 1 goals 0 are met wherever they were measured, 0 are missed somewhere, 1 are to measure and were measured, "
    )
    lines = tables([exits], lambda result: result.name, {"Guesses": [aim]})[5:]
    assert lines[0].startswith(f"| {aim.text} | AMD with AVX-512 | predicted gain")
    assert all(line.endswith(f" |  | measured | {name} |") for line in lines[:-1])
    assert lines[-1] == "|  | Intel with AMX | **no result** | | | |"
    assert missed([exits], lambda result: result.name, {"Guesses": [aim]})[2:] == []


def test_tables_say_what_is_known() -> None:
    aims = {"Speed": [Aim("TTFT", (("overhead", "TTFT above"),)), Aim("Rows", tests=("tests/x.py",), absent="No figure.")]}
    lines = tables([overhead("amx", 100.0, 9.0)], lambda result: result.name, aims)
    assert lines[1] == "### Speed"
    assert lines[-3:] == [
        "| TTFT | Intel with AMX | TTFT above the engine's: 9.0 ms | ≤ 5.0 ms | **missed by 80 %** | overhead_amx |",
        "|  | AMD with AVX-512 | **no result** | | | |",
        "| Rows |  | | | | `tests/x.py`. No figure. |",
    ]


def test_goals_that_are_missed_come_worst_first() -> None:
    aims = {"Speed": [Aim("TTFT", (("overhead", "TTFT above"), ("overhead", "processor time")))]}
    results = [overhead("avx512_bf16", 130.0, 6.0), overhead("amx", 100.0, 9.0)]
    rows = missed(results, lambda result: result.name, aims)[2:]
    assert [row.split(" | ")[1] for row in rows] == ["9.0 ms", "6.0 ms", "130 µs"]
    assert all(row.endswith(f"| {UNKNOWN} |") for row in rows)


def test_a_reason_is_of_one_commit() -> None:
    (result, figure, commit), text = next(iter(REASONS.items()))
    assert reason(result, figure, [commit]) == text
    assert reason(result, figure, ["a9b2d97" if commit != "a9b2d97" else "e4e14ee"]) == UNKNOWN


def test_reasons_are_of_the_results_that_there_are() -> None:
    """One that is no longer shown goes."""
    shown = {
        (result.name, figure.name, commit)
        for result in RESULTS
        for figure in result.figures
        if figure.goal and not figure.goal.is_met(figure.value)
        for commit in result.commits
    }
    assert REASONS.keys() - shown == set()

"""The catalogue names scripts, options and folders that there are, and every committed result belongs to a part."""

from __future__ import annotations

import importlib.util
import re

import pytest

from benchmarks.lib.environment import RESULTS, ROOT
from benchmarks.pages.figures import EXTRACT
from benchmarks.pages.results import owner
from benchmarks.suite.catalogue import PARTS
from benchmarks.suite.part import Part

SCRIPTS_WITHOUT_A_PART = {
    "__main__": "runs the parts",
    "gpu": "`tandem certify` has replaced it",
    "machine_profile": "writes the simulator's profile, which is a file of the product",
    "step_overhead": "is measured by engine",
    "worker_start": "is measured by engine",
    "against": "compares with a commit that somebody names",
}


def source(part: Part) -> str:
    """The text of a part's script."""
    assert part.module is not None
    spec = importlib.util.find_spec(part.module)
    assert spec is not None, part.module
    assert spec.origin is not None, part.module
    with open(spec.origin) as file:
        return file.read()


def test_names_are_unique() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_what_a_part_exercises_is_there(part: Part) -> None:
    assert part.exercises
    assert [path for path in part.exercises if not (ROOT / path).exists()] == []
    assert part.result in EXTRACT, "its figures are on no page"


@pytest.mark.parametrize("part", [part for part in PARTS if part.module not in (None, "pytest")], ids=lambda part: part.name)
def test_a_script_has_the_options_that_a_part_gives(part: Part) -> None:
    text = source(part)
    given = {word for word in part.arguments if word.startswith("--")} | ({"--state"} if part.keeps_state else set())
    shared = {"--peer-env": "servers.add_options", "--systems": "servers.add_options", "--state": "add_state"}
    known = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text))
    known |= {option for option, helper in shared.items() if helper.rpartition(".")[2] in text}
    assert given <= known


@pytest.mark.parametrize("part", [part for part in PARTS if part.module is not None], ids=lambda part: part.name)
def test_a_part_needs_the_folders_that_its_arguments_name(part: Part) -> None:
    named = {need.name.lower() for need in part.needs}
    for placeholder in ("peers", "traces", "clients"):
        assert (f"{{{placeholder}}}" in " ".join(part.arguments)) == (placeholder in named)
    assert ("{url}" in part.arguments) == (part.serve is not None)


def test_every_script_that_writes_results_is_a_part() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"}
    scripts |= {f"clients.{path.stem}" for path in (ROOT / "benchmarks" / "clients").glob("*.py") if path.stem != "__init__"}
    run = {part.module.removeprefix("benchmarks.") for part in PARTS if part.module}
    assert scripts - run == SCRIPTS_WITHOUT_A_PART.keys()


def test_every_result_belongs_to_a_part() -> None:
    for file in RESULTS.glob("*.json"):
        part, kind = owner(file.stem)
        assert part.per_processor == bool(kind), file.name
    with pytest.raises(ValueError, match="belongs to no part"):
        owner("made_up")
    with pytest.raises(ValueError, match="belongs to no part"):
        owner("engine_sse2")

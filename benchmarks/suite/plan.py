"""Which parts of `make bench` are run, and in which order: pure functions over the catalogue and what is done already.

    no outcome at this commit ──► run        done at this commit ──► left out
    failed, or over its limit, at this commit ──► run again, after all that were not tried
    a need is missing, or it is run by hand ──► skipped, with the reason

In a tree with changes nothing counts as done or tried: nobody knows of which tree a record is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.suite.part import Need, Part

Outcome = Literal["done", "failed", "over its budget"]
Verdict = Literal["run", "done", "skip"]


@dataclass(frozen=True)
class Record:
    """What became of a part, at which commit, and the seconds that it took."""

    commit: str
    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class Planned:
    """What is to be done with a part, and why it is skipped."""

    part: Part
    verdict: Verdict
    reason: str = ""


def plan(
    parts: Sequence[Part],
    records: Mapping[str, Record],
    commit: str,
    missing: Mapping[Need, str],
    only: Collection[str] = (),
) -> list[Planned]:
    """Return all parts, or those named in `only`: first those to run, in the order in which they are run.

    `missing` are the needs that this machine does not meet, each with the reason. A part that is named is run although it is
    done. Raises ValueError for a name that no part has.
    """
    if unknown := set(only) - {part.name for part in parts}:
        known = ", ".join(part.name for part in parts)
        raise ValueError(f"no part {sorted(unknown)[0]!r:.40}: it is one of {known}")
    planned = [_verdict(part, records, commit, missing, part.name in only) for part in parts if not only or part.name in only]

    def place(each: Planned) -> tuple[bool, bool]:
        return each.verdict != "run", _is_of(records, each.part, commit)

    return sorted(planned, key=place)


def _verdict(part: Part, records: Mapping[str, Record], commit: str, missing: Mapping[Need, str], is_named: bool) -> Planned:
    if part.module is None:
        return Planned(part, "skip", f"run by hand: {part.command}")
    for need in part.needs:
        if need in missing:
            return Planned(part, "skip", missing[need])
    if not is_named and _is_of(records, part, commit) and records[part.name].outcome == "done":
        return Planned(part, "done")
    return Planned(part, "run")


def _is_of(records: Mapping[str, Record], part: Part, commit: str) -> bool:
    """Whether the part was tried at this commit."""
    return part.name in records and records[part.name].commit == commit and not has_changes(commit)


def has_changes(commit: str) -> bool:
    """Return whether the tree differed from the commit."""
    return "+" in commit


def may_begin(spent_s: float, budget_s: float | None) -> bool:
    """Whether another part may begin after this much time. Without a budget it always may."""
    return budget_s is None or spent_s < budget_s

"""Which parts of `make bench` are run, and in which order: pure functions over the catalogue and what is done already.

    no record, or the part's code has changed since ──► run        done ──► left out
    failed, or over its limit, with the code as it is ──► run again, after all that were not tried
    a need is missing, or it is run by hand ──► skipped, with the reason

Whether its code has changed is what the pages of results ask, too (`benchmarks/suite/history.py`): what is done is current
there, and what is older there is run. A tree with changes is in no commit, so nothing that was done in one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.suite.part import Need, Part

Outcome = Literal["done", "failed", "over its budget"]
Verdict = Literal["run", "done", "skip"]
IsCurrent = Callable[[str, Part], bool]
"""Whether nothing that a part exercises has changed since a commit."""


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
    is_current: IsCurrent,
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
    counting = {
        name for name, record in records.items() for part in parts if part.name == name and is_current(record.commit, part)
    }

    def verdict(part: Part) -> Planned:
        if part.module is None:
            return Planned(part, "skip", f"run by hand: {part.command}")
        for need in part.needs:
            if need in missing:
                return Planned(part, "skip", missing[need])
        is_done = part.name in counting and records[part.name].outcome == "done"
        return Planned(part, "done" if is_done and part.name not in only else "run")

    planned = [verdict(part) for part in parts if not only or part.name in only]
    return sorted(planned, key=lambda each: (each.verdict != "run", each.part.name in counting))


def has_changes(commit: str) -> bool:
    """Return whether the tree differed from the commit."""
    return "+" in commit


def may_begin(spent_s: float, budget_s: float | None) -> bool:
    """Return whether another part may begin after this much time. Without a budget it always may."""
    return budget_s is None or spent_s < budget_s

"""What an expression of PromQL names, as far as it can be told without parsing it, and what Tandem's /metrics has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.unit.test_snapshots import metrics as described_metrics

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
SCRAPE_LABELS = {"job", "instance"}
OTHER_NAMES = {"up", "ALERTS"}
"""Series that Prometheus itself makes."""

_STRING = re.compile(r'"[^"]*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_MATCHERS_OR_RANGE = re.compile(r"\{[^}]*\}|\[[^\]]*\]")
_NAME = re.compile(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?![\w:]|\s*\()")
_WORDS = {"and", "or", "unless", "offset", "bool"}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_FAMILY = re.compile(r"^(\S+) (\w+) \(([^)]*)\)(?:\n    (?!buckets).*)?(?:\n    buckets: (.*))?", re.MULTILINE)


@dataclass(frozen=True)
class Family:
    """One family of /metrics: the labels of its samples, and the bounds of a histogram's buckets."""

    labels: frozenset[str]
    buckets: tuple[float, ...]


def known_series(folder: Path) -> dict[str, Family]:
    """Every name of a sample that /metrics can have. A histogram has three of them."""
    found: dict[str, Family] = {}
    for name, kind, labels, bounds in _FAMILY.findall(described_metrics(folder)):
        family = Family(frozenset(filter(None, labels.split(", "))), tuple(float(bound) for bound in bounds.split()))
        if kind == "histogram":
            found |= {f"{name}_count": family, f"{name}_sum": family}
            found[f"{name}_bucket"] = Family(family.labels | {"le"}, family.buckets)
        else:
            found[name] = family
    return found


def recorded_names() -> set[str]:
    """Names that the recording rules make."""
    groups = yaml.safe_load((PROMETHEUS / "recording.yml").read_text())["groups"]
    return {rule["record"] for group in groups for rule in group["rules"]}


def names_in(expr: str) -> set[str]:
    """The series that an expression reads."""
    bare = _MATCHERS_OR_RANGE.sub("", _GROUPING.sub("", _STRING.sub('""', expr)))
    return set(_NAME.findall(bare)) - _WORDS


def labels_in(expr: str) -> dict[str, set[str]]:
    """The labels that an expression asks of each series."""
    found: dict[str, set[str]] = {}
    for name, matchers in _SELECTOR.findall(expr):
        found.setdefault(name, set()).update(_LABEL.findall(_STRING.sub("", matchers)))
    return found


def problems(expr: str, known: dict[str, Family], recorded: set[str]) -> list[str]:
    """What is wrong with the names in an expression, one line for each."""
    lines = [f"no such series: {name}" for name in sorted(names_in(expr) - known.keys() - recorded - OTHER_NAMES)]
    for name, labels in labels_in(expr).items():
        if name in known and (wrong := labels - known[name].labels - SCRAPE_LABELS):
            lines.append(f"{name} has no label {', '.join(sorted(wrong))}")
    if expr.count("(") != expr.count(")"):
        lines.append(f"a parenthesis is missing: {expr}")
    return lines

"""The words in which dashboards are described: a board has rows, a row has panels, a panel has queries.

Two signs stand for what every query has. `$of` is the choice of clusters and models at the top of the dashboard, `$rate` the
window of a rate, which Grafana makes wide enough for the interval of the scrapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

PER_S = "suffix: /s"
"""The unit of what is counted per second and is neither requests nor bytes."""
_QUANTILES = {0.5: "half", 0.9: "90 %", 0.99: "99 %"}

Kind = Literal["timeseries", "stat", "bargauge"]


@dataclass(frozen=True)
class Query:
    """One PromQL expression. `legend` names its series, with labels in double braces."""

    expr: str
    legend: str = ""

    def named(self, legend: str) -> Query:
        """The same under another legend."""
        return replace(self, legend=legend)

    def or_zero(self) -> Query:
        """The same, or 0 where there is nothing: series whose label names an event begin with the first one."""
        return replace(self, expr=f"{self.expr} or vector(0)")

    def __truediv__(self, other: Query) -> Query:
        return replace(self, expr=f"{self.expr} / {other.expr}")

    def __add__(self, other: Query) -> Query:
        return replace(self, expr=f"({self.expr} + {other.expr})")

    def __sub__(self, other: Query) -> Query:
        return replace(self, expr=f"({self.expr} - {other.expr})")


def rate(counter: str, by: str = "", where: str = "") -> Query:
    """A counter's increase per second, added up over all series or, with `by`, over those with equal labels of these names.

    `where` has further matchers.
    """
    return Query(f"sum{_by(by)}(rate({_selected(counter, where)}[$rate]))", _legend(by))


def gauge(name: str, by: str = "", where: str = "", how: str = "sum") -> Query:
    """A gauge, put together over all series or, with `by`, over those with equal labels: by sum, max, min or avg."""
    return Query(f"{how}{_by(by)}({_selected(name, where)})", _legend(by))


def increase(counter: str, by: str = "", where: str = "") -> Query:
    """What a counter has gained in the time that the dashboard shows, the largest first."""
    return Query(f"sort_desc(sum{_by(by)}(increase({_selected(counter, where)}[$__range])))", _legend(by))


def _selected(name: str, where: str) -> str:
    return f"{name}{{$of, {where}}}" if where else f"{name}{{$of}}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def _legend(labels: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels.split(", ")) if labels else ""


@dataclass(frozen=True)
class Panel:
    """One picture. `unit` is a name of Grafana's, or `suffix:` and a word; `width` is in 24ths of the page."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    about: str
    kind: Kind
    width: int
    height: int = 8
    stacked: bool = False

    def wide(self) -> Panel:
        """The same at half of the page's width."""
        return replace(self, width=12)


def lines(title: str, unit: str, *queries: Query, about: str = "", stacked: bool = False) -> Panel:
    """Lines over time, at a third of the page's width."""
    return Panel(title, unit, queries, about, "timeseries", width=8, stacked=stacked)


def number(title: str, unit: str, *queries: Query, about: str = "") -> Panel:
    """The latest value of each query, large, with a small line of the values before it."""
    return Panel(title, unit, queries, about, "stat", width=4, height=5)


def bars(title: str, unit: str, query: Query, about: str = "") -> Panel:
    """The latest value of each series as a bar."""
    return Panel(title, unit, (query,), about, "bargauge", width=8)


def quantiles(title: str, histogram: str, about: str = "") -> Panel:
    """What a half, 90 % and 99 % of the values of a histogram, in seconds, do not exceed."""
    buckets = rate(f"{histogram}_bucket", "le").expr
    queries = [Query(f"histogram_quantile({share}, {buckets})", name) for share, name in _QUANTILES.items()]
    return lines(title, "s", *queries, about=about)


@dataclass(frozen=True)
class Row:
    """Panels under a heading, from left to right, then in the next line."""

    title: str
    panels: tuple[Panel, ...]


def row(title: str, *panels: Panel) -> Row:
    """A row of these panels."""
    return Row(title, panels)


@dataclass(frozen=True)
class Board:
    """One dashboard. `uid` is also the name of its file."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    by_tenant: bool = False
    """Whether it has a choice of tenants, for queries with `tenant=~"$tenant"`."""

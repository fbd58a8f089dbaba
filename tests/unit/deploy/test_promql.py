"""The reader of expressions finds what is wrong with them."""

from __future__ import annotations

from tests.unit.deploy.promql import Family, labels_in, names_in, problems


def test_names_are_those_of_series() -> None:
    expr = """
        sum by (instance, role) (rate(tandem:a_total{role="b or c", worker!~"d|e"}[$__rate_interval]))
        / on (instance) group_left () max without (le) (tandem:b unless tandem:c offset 1h) > 0.5 and 14.4 * up == bool 1e3
    """
    assert names_in(expr) == {"tandem:a_total", "tandem:b", "tandem:c", "up"}
    assert labels_in(expr) == {"tandem:a_total": {"role", "worker"}}


def test_problems_are_named() -> None:
    known = {"tandem:a": Family(frozenset({"role"}), ())}
    assert problems('tandem:a{role="x", instance="y"}', known, set()) == []
    assert problems("sum(tandem:a) + recorded:b", known, {"recorded:b"}) == []
    assert problems('tandem:a{worker="x"} + tandem:b', known, set()) == [
        "no such series: tandem:b",
        "tandem:a has no label worker",
    ]
    assert problems("sum(rate(tandem:a[5m])", known, set()) == ["a parenthesis is missing: sum(rate(tandem:a[5m])"]

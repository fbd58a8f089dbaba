"""The share of a tenant at a decode worker: the same at all routers, without its name, by weight and priority."""

from __future__ import annotations

import math

import pytest

from protocol.errors import InvalidRequestError
from protocol.share import Share
from router.rules.fair_queue import SchedulingClass
from router.rules.shares import share_of


def test_tenants_are_told_apart_and_not_named() -> None:
    one, two = share_of(SchedulingClass("acme")), share_of(SchedulingClass("other"))
    assert one == share_of(SchedulingClass("acme"))
    assert one.tenant != two.tenant
    assert b"acme" not in one.tenant
    one.check()


@pytest.mark.parametrize(("level", "factor"), [(0, 1.0), (1, 0.5), (-1, 2.0), (3, 0.125), (40, 0.125), (-40, 8.0)])
def test_each_level_of_priority_doubles_the_weight_up_to_eight_times(level: int, factor: float) -> None:
    assert share_of(SchedulingClass("acme", 3.0, level)).strength == 3.0 * factor


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan, 1e-9, 1e9])
def test_a_weight_that_no_router_sends_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequestError, match="weight"):
        Share(b"tenant", weight).check()


@pytest.mark.parametrize("share", [Share(b"x" * 17, 1.0), Share(b"", 1.0, 1000), Share(b"", 1.0, -1000)])
def test_a_share_of_a_strange_tenant_or_level_is_refused(share: Share) -> None:
    with pytest.raises(InvalidRequestError):
        share.check()

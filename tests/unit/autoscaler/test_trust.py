"""Room for what the reckoning does not know: it comes when limits are missed for long, and goes slowly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.demand import Demand, InTime, RoleState
from autoscaler.trust import JUDGE_S, Trust
from protocol.messages.workers import Role

PREFILL, DECODE = Role.PREFILL, Role.DECODE
KEPT, MISSED = InTime(1.0, 1.0), InTime(0.5, 0.5)
FINE = Demand(
    rate=1.0,
    lengths=None,
    waiting=0,
    first_tokens=KEPT,
    paced=KEPT,
    roles={PREFILL: RoleState(workers=1), DECODE: RoleState(workers=1)},
    prefill_s=None,
    prompt_s=None,
    idle_s=0.0,
)


class Judging:
    """Trust that is told every second, for whole judgements."""

    def __init__(self) -> None:
        self.trust = Trust(0.95)
        self.now = 0.0

    def judge(self, demand: Demand, times: int = 1) -> tuple[float, float]:
        for _ in range(round(times * JUDGE_S)):
            self.trust.note(demand, self.now)
            self.now += 1.0
        return self.trust.margin(PREFILL), self.trust.margin(DECODE)


def test_room_comes_by_tenths_up_to_a_half() -> None:
    late = replace(FINE, first_tokens=MISSED)
    judging = Judging()
    assert judging.judge(late) == pytest.approx((1.1, 1.0))
    assert judging.judge(late) == pytest.approx((1.21, 1.0))
    assert judging.judge(late, 10) == (1.5, 1.0)


def test_room_goes_three_times_as_slowly_as_it_comes() -> None:
    judging = Judging()
    judging.judge(replace(FINE, first_tokens=MISSED))
    prefill, _ = judging.judge(FINE, 3)
    assert 1.0 < prefill < 1.01
    assert judging.judge(FINE) == (1.0, 1.0)


@pytest.mark.parametrize("shares", [InTime(0.5, 0.96), InTime(1.0, 0.5), InTime(None, 0.5), InTime(0.5, None)])
def test_what_is_over_or_has_just_begun_gives_no_room(shares: InTime) -> None:
    """A bad minute may be chance; a bad quarter of an hour with a good minute at its end has been mended already."""
    assert Judging().judge(replace(FINE, first_tokens=shares, paced=shares)) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("first_tokens", "paced", "roles", "expected"),
    [
        (MISSED, KEPT, FINE.roles, (1.1, 1.0)),
        (KEPT, MISSED, FINE.roles, (1.0, 1.1)),
        (MISSED, MISSED, FINE.roles, (1.1, 1.1)),
        (MISSED, KEPT, {PREFILL: RoleState(workers=1), DECODE: RoleState(workers=1, kv_usage=0.95)}, (1.0, 1.1)),
        (MISSED, KEPT, {DECODE: RoleState(workers=1)}, (1.0, 1.1)),
    ],
    ids=["prompts wait", "steps are slow", "both", "decode is full", "nobody has the role prefill"],
)
def test_who_is_to_blame_gets_it(
    first_tokens: InTime, paced: InTime, roles: dict[Role, RoleState], expected: tuple[float, float]
) -> None:
    demand = replace(FINE, first_tokens=first_tokens, paced=paced, roles=roles)
    assert Judging().judge(demand) == pytest.approx(expected)

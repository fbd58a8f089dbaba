"""The waiting line: the front, bounds, leaving early, who is refused for the pace."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import OverloadedError
from router.dispatch.line import WaitingLine
from router.rules.fair_queue import ANYBODY, Entry, RequestProgress, SchedulingClass
from router.rules.line_rules import LineRules, Pace

A, B = SchedulingClass("a"), SchedulingClass("b")


async def wait_in(
    line: WaitingLine,
    until: float,
    order: list[str] | None = None,
    name: str = "",
    *,
    scheduling_class: SchedulingClass = ANYBODY,
    ahead: bool = False,
    hold_s: float = 0.0,
) -> None:
    """Come to the front, stay there for a moment, and be served."""
    with line.place(scheduling_class, 1, until, ahead=ahead) as place:
        await place.front()
        await asyncio.sleep(hold_s)
        place.served = True
        if order is not None:
            order.append(name)


def deadline(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def test_who_would_go_before_the_one_at_the_front_knows_it() -> None:
    async def main() -> None:
        line = WaitingLine(10, 1.0)
        served = asyncio.create_task(wait_in(line, deadline(), scheduling_class=A))
        await asyncio.sleep(0)
        with line.place(A, 1, deadline()) as waits:
            assert not waits.outranks_front
            await served
            await waits.front()
            with line.place(A, 1, deadline()) as behind, line.place(B, 1, deadline()) as newcomer:
                assert (behind.outranks_front, newcomer.outranks_front) == (False, True)
                looks_again = asyncio.create_task(waits.front())
                await newcomer.front()
                assert not looks_again.done()
                looks_again.cancel()

    asyncio.run(main())


def test_first_come_first_served_and_resumed_go_ahead() -> None:
    async def main() -> None:
        line, order = WaitingLine(10, 1.0), list[str]()
        with line.place(ANYBODY, 1, deadline()) as first:
            await first.front()
            tasks = []
            for name, ahead in [("b", False), ("r1", True), ("c", False), ("r2", True)]:
                tasks.append(asyncio.create_task(wait_in(line, deadline(), order, name, ahead=ahead)))
                await asyncio.sleep(0)
            assert len(line) == 5
            await asyncio.sleep(0.01)
            assert order == [], "one at a time"
        await asyncio.gather(*tasks)
        assert order == ["r1", "r2", "b", "c"]
        assert len(line) == 0

    asyncio.run(main())


def test_who_finds_no_room_steps_back_for_whoever_is_due() -> None:
    async def main() -> None:
        line, order = WaitingLine(10, 1.0), list[str]()
        with line.place(SchedulingClass("low", 1.0, 5), 1, deadline()) as place:
            await place.front()
            await place.front()
            task = asyncio.create_task(wait_in(line, deadline(), order, "better"))
            await asyncio.sleep(0.01)
            assert order == [], "it looks for room now"
            await place.front()
            assert order == ["better"]
            await task

    asyncio.run(main())


def test_limit_and_deadline() -> None:
    async def main() -> None:
        line = WaitingLine(2, 1.0)
        with line.place(ANYBODY, 1, deadline()) as front:
            await front.front()
            waiting = asyncio.create_task(wait_in(line, deadline(0.05)))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="2 requests are waiting") as refused, line.place(ANYBODY, 1, deadline()):
                pass
            assert refused.value.retry_after_s is not None
            assert refused.value.retry_after_s >= 1
            with line.place(ANYBODY, 1, deadline(), ahead=True):
                assert len(line) == 3, "a resumed stream is never refused"
            with pytest.raises(TimeoutError):
                await waiting
            assert len(line) == 1

    asyncio.run(main())


def test_a_full_line_makes_room_for_whoever_has_less_in_it() -> None:
    async def main() -> None:
        line, order = WaitingLine(3, 1.0), list[str]()
        with line.place(A, 1, deadline()) as front:
            await front.front()
            crowd = []
            for name in ("a1", "a2"):
                crowd.append(asyncio.create_task(wait_in(line, deadline(), order, name, scheduling_class=A)))
                await asyncio.sleep(0)
            other = asyncio.create_task(wait_in(line, deadline(), order, "b", scheduling_class=B))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await crowd[1]
            assert len(line) == 3
            with pytest.raises(OverloadedError), line.place(A, 1, deadline()):
                pass
        await asyncio.gather(crowd[0], other)
        assert set(order) == {"a1", "b"}

    asyncio.run(main())


def test_who_would_wait_too_long_at_the_present_pace_is_refused_at_once() -> None:
    async def main() -> None:
        line = WaitingLine(1000, 1.0)
        await asyncio.gather(*(wait_in(line, deadline(), scheduling_class=A, hold_s=0.02) for _ in range(9)))
        tasks = [asyncio.create_task(wait_in(line, deadline(60), scheduling_class=A)) for _ in range(200)]
        with line.place(SchedulingClass("first", 1.0, -9), 1, deadline()) as front:
            await front.front()
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="as requests are served now") as refused, line.place(A, 1, deadline(1.0)):
                pass
            assert refused.value.retry_after_s is not None
            assert 3 <= refused.value.retry_after_s <= 20, "200 requests of 20 ms, on a busy machine"
            with line.place(A, 1, deadline(60)):
                pass
            with line.place(B, 1, deadline(1.0)):
                pass  # another tenant goes before most of them
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_the_pace_counts_only_while_others_wait() -> None:
    pace = Pace()
    for now in (0.0, 1.0, 2.0, 3.0):
        pace.served(now, True)
        assert pace.gap_s(now) is None, "too few to go by"
    pace.served(4.0, False)
    pace.served(1000.0, True)
    for now in (1001.0, 1002.0, 1003.0, 1004.0, 1005.0):
        pace.served(now, True)
    assert pace.gap_s(1005.0) == pytest.approx(1.0)
    for number in range(1, 100):
        pace.served(1005.0 + 3.0 * number, True)
    assert pace.gap_s(1302.0) == pytest.approx(3.0, rel=0.01)
    assert pace.gap_s(5000.0) == pytest.approx(3.0, rel=0.01), "a line that stands still is as slow as ever"
    pace.served(1305.0, False)
    assert pace.gap_s(1306.0) == pytest.approx(3.0, rel=0.01)
    assert pace.gap_s(1305.0 + 90.0) is None, "of a minute ago and more"


def test_nobody_is_refused_for_a_pace_of_long_ago() -> None:
    rules = LineRules(100, 1.0)
    entries = [rules.enter(A, 1.0, 600.0, 0.0)[0] for _ in range(16)]
    for number, entry in enumerate(entries):
        rules.leave(entry, 3.0 * number, served=True)
    for _ in range(20):
        rules.enter(B, 1.0, 63.0, 45.0)
    with pytest.raises(OverloadedError):
        rules.enter(B, 1.0, 59.0, 45.0)
    for _ in range(len(rules)):
        rules.leave(_first(rules), 45.0, served=False)
    for _ in range(64):
        rules.enter(A, 1.0, 60.0, 3600.0)


def test_time_in_which_nobody_waits_is_no_gap() -> None:
    rules = LineRules(100, 1.0)
    served, gives_up = (rules.enter(A, 1.0, 60.0, 0.0)[0] for _ in range(2))
    rules.leave(served, 0.0, served=True)
    rules.leave(gives_up, 1.0, served=False)
    for number in range(8):
        entry, _ = rules.enter(A, 1.0, 60.0, 3600.0)
        rules.enter(B, 1.0, 60.0, 3600.0)
        rules.leave(entry, 3600.0 + 0.01 * number, served=True)


def _first(rules: LineRules) -> Entry:
    entry = rules.call(0.0)
    assert entry is not None
    return entry


@settings(max_examples=60)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_leaving_never_blocks_those_behind(ahead: list[bool], chance: random.Random) -> None:
    async def main() -> None:
        line = WaitingLine(100, 1.0)
        tasks = []
        for flag in ahead:
            tasks.append(asyncio.create_task(wait_in(line, deadline(), ahead=flag)))
            await asyncio.sleep(0)
        for task in chance.sample(tasks, k=len(tasks) // 2):
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(line) == 0
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)

    asyncio.run(main())


def test_who_stands_aside_lets_other_tenants_look_but_nobody_of_its_own() -> None:
    async def main() -> None:
        line, order = WaitingLine(10, 1.0), list[str]()
        with line.place(A, 1, deadline()) as first:
            await first.front()
            others = [("a", A), ("b", B), ("b again", B)]
            tasks = [asyncio.create_task(wait_in(line, deadline(), order, name, scheduling_class=who)) for name, who in others]
            await asyncio.sleep(0.01)
            assert order == []
            first.step_aside()
            await asyncio.sleep(0.01)
            assert order == ["b", "b again"]
            await first.front()
            first.served = True
        await asyncio.gather(*tasks)
        assert order == ["b", "b again", "a"]

    asyncio.run(main())


def test_who_lets_pass_lets_its_own_tenant_look_too_until_it_looks_again() -> None:
    async def main() -> None:
        line, order = WaitingLine(100, 1.0), list[str]()
        with line.place(A, 1, deadline()) as first:
            await first.front()
            task = asyncio.create_task(wait_in(line, deadline(), order, "short", scheduling_class=A))
            await asyncio.sleep(0.01)
            assert order == []
            first.let_pass()
            await task
            assert order == ["short"]
            await first.front()
            task = asyncio.create_task(wait_in(line, deadline(), order, "later", scheduling_class=A))
            await asyncio.sleep(0.01)
            assert order == ["short"], "it is first again"
        await task

    asyncio.run(main())


def test_only_some_let_pass_at_a_time_and_the_next_one_holds_up_its_class_alone() -> None:
    rules = LineRules(100, 1.0)
    long = [rules.enter(A, 1, 10, 0)[0] for _ in range(9)]
    for each in long:
        assert rules.call(0) is each
        rules.let_pass(each)
    rules.enter(A, 1, 10, 0)
    assert rules.call(0) is None, "it is of their class"
    for who in (B, SchedulingClass("a", level=1)):
        other, _ = rules.enter(who, 1, 10, 0)
        assert rules.call(0) is other
        rules.leave(other, 0, served=True)
    for each in long:
        assert not rules.step_back(each)
    assert rules.call(0) is long[0], "all look again"


def test_a_tenant_s_retry_without_room_holds_up_no_other_tenant_s() -> None:
    """Nor does one that is let pass when enough are passed already."""
    rules = LineRules(100, 1.0)
    crowd = [rules.enter(A, 1, 10, 0, retry=True)[0] for _ in range(9)]
    for without_room in (rules.step_aside, rules.let_pass):
        other, _ = rules.enter(B, 1, 10, 0, retry=True)
        while (first := rules.call(0)) is not other:
            assert first in crowd
            without_room(first)
        rules.leave(other, 0, served=True)
        for each in crowd:
            rules.step_back(each)


def test_who_leaves_or_is_turned_out_while_it_stands_aside_holds_nobody_up() -> None:
    async def main() -> None:
        line, order = WaitingLine(2, 1.0), list[str]()
        with line.place(A, 1, deadline()) as first:
            await first.front()
            first.step_aside()
            second = asyncio.create_task(wait_in(line, deadline(), order, "second", scheduling_class=A))
            await asyncio.sleep(0.01)
            assert order == []
            other = asyncio.create_task(wait_in(line, deadline(), order, "other", scheduling_class=B))
            with pytest.raises(OverloadedError):
                await second
            await other
        await wait_in(line, deadline(), order, "last", scheduling_class=A)
        assert order == ["other", "last"]
        with line.place(A, 1, deadline()) as first:
            await first.front()
            first.step_aside()
            waiting = asyncio.create_task(wait_in(line, deadline(), order, "behind", scheduling_class=A))
            await asyncio.sleep(0)
        await waiting
        assert order[-1] == "behind"

    asyncio.run(main())


def test_a_resumed_stream_may_stand_aside_too() -> None:
    async def main() -> None:
        line, order = WaitingLine(10, 1.0), list[str]()
        with line.place(A, 1, deadline(), ahead=True) as first:
            await first.front()
            waiting = asyncio.create_task(wait_in(line, deadline(), order, "b", scheduling_class=B))
            await asyncio.sleep(0)
            first.step_aside()
            await waiting
            assert order == ["b"]
            await first.front()
            first.served = True

    asyncio.run(main())


def test_retries_take_no_place_of_the_line_from_others() -> None:
    rules = LineRules(4, 1.0)
    for _ in range(4):
        rules.enter(A, 1, 60.0, 0.0, retry=True)
    assert rules.enter(B, 1, 60.0, 0.0)[1] is None, "nobody else waits"


def test_a_choice_of_a_request_that_has_begun_is_neither_refused_nor_put_out() -> None:
    """Not for the pace, nor for the limit. It may have been in line before another choice began, and waits its turn."""
    rules, progress = LineRules(2, 1.0), RequestProgress()
    for number, entry in enumerate([rules.enter(B, 1, 60.0, 0.0, retry=True)[0] for _ in range(16)]):
        rules.leave(entry, float(number), served=True)
    choices = [rules.enter(A, 1, 60.0, 16.0, progress=progress)[0] for _ in range(2)]
    with pytest.raises(OverloadedError, match="as requests are served now"):
        rules.enter(A, 1, 0.5, 16.0, progress=progress)
    progress.begun = True
    choices.append(rules.enter(A, 1, 0.5, 16.0, progress=progress)[0])
    newcomers = [rules.enter(B, 1, 60.0, 16.0)[0] for _ in range(2)]
    choices.append(rules.enter(A, 1, 60.0, 16.0, progress=progress)[0])
    with pytest.raises(OverloadedError, match="are waiting already"):
        rules.enter(B, 1, 60.0, 16.0)
    assert rules.enter(SchedulingClass("c"), 1, 60.0, 16.0)[1] is newcomers[1]
    order = []
    while (first := rules.call(16.0)) is not None:
        order.append(first)
        rules.leave(first, 16.0, served=True)
    assert [entry for entry in order if entry in choices] == choices
    assert newcomers[0] in order[:2], "they do not go ahead of others"


def test_nobody_is_put_out_of_a_line_that_is_full_by_its_retries() -> None:
    rules = LineRules(4, 1.0)
    for tenant in (A, A, B):
        rules.enter(tenant, 1, 60.0, 0.0)
        rules.enter(A, 1, 60.0, 0.0, retry=True)
    newcomer = SchedulingClass("c")
    assert rules.enter(newcomer, 1, 60.0, 0.0)[1] is None, "three and one are no more than four"
    with pytest.raises(OverloadedError):
        rules.enter(newcomer, 1, 60.0, 0.0)

"""W3C trace context: what is continued, what begins a new trace. Cases named after those of the W3C's own test suite."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.trace import MAX_STATE_CHARS, TraceContext, continued, new_trace

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"

hexes = st.text("0123456789abcdef", min_size=1)


def state_of(*headers: str) -> str:
    return continued([PARENT], headers).state


def test_a_valid_parent_is_continued_with_a_span_of_our_own() -> None:
    first, second = continued([PARENT], ["a=1"]), continued([PARENT], ["a=1"])
    for trace in (first, second):
        assert (trace.trace_id, trace.sampled, trace.state) == (TRACE, True, "a=1")
        assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", trace.traceparent)
    assert len({SPAN, first.span_id, second.span_id}) == 3
    assert continued([f"00-{TRACE}-{SPAN}-00"], []).traceparent.endswith("-00")


@pytest.mark.parametrize(
    ("parent", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-ff", "01"),  # flags that this version does not know are ignored, and not sent on
        (f"00-{TRACE}-{SPAN}-fe", "00"),
        (f"cc-{TRACE}-{SPAN}-01", "01"),  # a later version: what is known of it is read
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-holds", "01"),
        (f"fe-{TRACE}-{SPAN}-02-", "00"),
    ],
)
def test_flags_and_later_versions(parent: str, flags: str) -> None:
    trace = continued([parent], ["a=1"])
    assert (trace.trace_id, trace.state) == (TRACE, "a=1")
    assert trace.traceparent == f"00-{TRACE}-{trace.span_id}-{flags}"


@pytest.mark.parametrize(
    "parents",
    [
        [],
        [""],
        [PARENT, PARENT],
        [PARENT.upper()],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"0-{TRACE}-{SPAN}-01"],
        [f"000-{TRACE}-{SPAN}-01"],
        [f".0-{TRACE}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE[1:]}-{SPAN}-01"],
        [f"00-{TRACE}a-{SPAN}-01"],
        [f"00-{TRACE}-{SPAN[1:]}-01"],
        [f"00-{TRACE}-{SPAN[1:]}.-01"],
        [f"00-{TRACE}-{SPAN}-1"],
        [f"00-{TRACE}-{SPAN}-.0"],
        [f"{PARENT}-"],
        [f"{PARENT}-more"],
        [f"cc-{TRACE}-{SPAN}-01.more"],
        [f"{PARENT}\n"],
        [f" {PARENT}"],
    ],
)
def test_anything_else_is_a_new_trace_without_others_notes(parents: list[str]) -> None:
    trace = continued(parents, ["a=1"])
    assert trace.trace_id != TRACE
    assert (trace.sampled, trace.state) == (False, "")
    trace.check()
    assert continued(parents, []).trace_id != trace.trace_id


@pytest.mark.parametrize(
    ("headers", "state"),
    [
        (["foo=1,bar=2"], "foo=1,bar=2"),
        (["foo=1", "bar=2"], "foo=1,bar=2"),
        (["foo=1 \t , \t bar=2", "baz=3"], "foo=1,bar=2,baz=3"),
        (["foo=1,,", "", "bar=2"], "foo=1,bar=2"),
        (
            [
                "t@v=1",
            ],
            "t@v=1",
        ),
        (["0tenant-_*/@v-_*/=1"], "0tenant-_*/@v-_*/=1"),
        (["a= b !~"], "a= b !~"),
        ([f"{'z' * 256}=1"], f"{'z' * 256}=1"),
        (["foo=1,foo=2"], "foo=1,foo=2"),
        (["foo"], ""),
        (["foo=1,="], ""),
        (["foo=1,bar="], ""),
        (["FOO=1"], ""),
        (["foo@=1"], ""),
        (["@v=1"], ""),
        (["a@b@c=1"], ""),
        (["foo=1=2"], ""),
        (["foo =1"], ""),
        (["foo=ü"], ""),
        ([f"{'z' * 257}=1"], ""),
        ([f"a={'v' * 257}"], ""),
        ([",".join(f"k{n}=1" for n in range(33))], ""),
        ([",".join(f"k{n}=1" for n in range(32))], ",".join(f"k{n}=1" for n in range(32))),
    ],
)
def test_state(headers: list[str], state: str) -> None:
    assert state_of(*headers) == state


def test_a_long_state_loses_long_members_first_and_then_the_last() -> None:
    long, short = f"long={'x' * 200}", [f"k{n:02}={'x' * 30}" for n in range(12)]
    assert state_of(",".join([long, *short])) == ",".join(short)
    assert state_of(",".join([long, long.upper().lower(), "a=1"])) == f"{long},{long},a=1"
    many = [f"k{n:02}={'x' * 30}" for n in range(30)]
    kept = state_of(",".join(many))
    assert len(kept) <= MAX_STATE_CHARS < len(kept) + 35
    assert ",".join(many).startswith(kept)


@given(st.lists(st.text(max_size=60) | st.from_regex(r"\A[0f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z"), max_size=2))
def test_whatever_is_sent_the_result_is_valid_and_can_be_continued(parents: list[str]) -> None:
    trace = continued(parents, parents)
    trace.check()
    assert continued([trace.traceparent], []).trace_id == trace.trace_id


@given(st.binary(max_size=80), st.binary(max_size=700))
def test_bytes_of_any_kind(parent: bytes, state: bytes) -> None:
    continued([parent.decode("latin-1")], [state.decode("latin-1")]).check()
    continued([PARENT], [state.decode("latin-1")]).check()


@pytest.mark.parametrize("change", [{"trace_id": "x"}, {"trace_id": TRACE * 2}, {"span_id": ""}, {"state": "x" * 513}])
def test_what_no_router_makes_is_refused(change: dict[str, str]) -> None:
    good = TraceContext(TRACE, SPAN, sampled=True, state="")
    good.check()
    new_trace().check()
    with pytest.raises(ProtocolError, match="trace context"):
        replace(good, **change).check()  # type: ignore[arg-type]

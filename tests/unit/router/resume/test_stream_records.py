"""Records of resumable streams: whole, of one owner at a time, and within their bounds. Ids of events."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequestError
from router.resume.event_ids import START, EventId, EventIds
from router.resume.stream_records import Entry, StreamKey, StreamRecords, WriteOutcome

KEYS = [StreamKey(tenant, path, "r") for tenant in ("", "acme") for path in ("/v1/completions", "/v1/chat/completions")]


def key(name: str) -> StreamKey:
    return StreamKey("", "/v1/completions", name)


def begin(records: StreamRecords, name: str, now: float = 0.0, size: int = 1) -> WriteOutcome:
    return records.write([Entry(key(name), "me", 0.0, 0, b"x" * size)], now)[0]


@dataclass
class Writer:
    """A stream that records what it says, and has to end when it is told so."""

    key: StreamKey
    owner: str
    said: list[bytes] = field(default_factory=list)
    recorded: bool = True


acts = st.lists(
    st.tuples(st.sampled_from(["begin", "say", "resume", "wait"]), st.integers(0, 3), st.integers(0, 120)), max_size=60
)


@given(acts, st.integers(1, 4), st.integers(300, 4000))
def test_what_is_taken_over_is_what_was_let_out(acts: list[tuple[str, int, int]], max_streams: int, max_bytes: int) -> None:
    """Any course of beginning, saying and taking over, with records forgotten in between for want of time or room."""
    records, now, retention_s = StreamRecords(max_streams, max_bytes, 100.0), 0.0, 100.0
    writers: list[Writer] = []
    current: dict[StreamKey, Writer] = {}
    touched: dict[StreamKey, float] = {}
    for number, (act, which, size) in enumerate(acts):
        at = KEYS[which]
        if act == "wait":
            now += size
        elif act == "begin":
            writer = current[at] = Writer(at, f"owner-{number}")
            writers.append(writer)
        elif act == "resume" and at in current:
            chunks = records.take_over(at, f"owner-{number}", 0.0, 0, now)
            if chunks is None:
                assert not current[at].recorded or not current[at].said or len(touched) > 1 or now - touched[at] > retention_s
            else:
                assert chunks == current[at].said, "all that was let out, and nothing else"
                assert now - touched[at] <= retention_s
                touched[at] = now
                current[at] = Writer(at, f"owner-{number}", list(chunks))
                writers.append(current[at])
        if act in ("begin", "say"):
            for writer in [each for each in reversed(writers) if each.key == at and each.recorded]:
                chunk = f"{writer.owner} {len(writer.said)}".encode().ljust(size)
                [outcome] = records.write([Entry(at, writer.owner, 0.0, len(writer.said), chunk)], now)
                if outcome is WriteOutcome.KEPT:
                    assert writer is current[at], "one owner at a time"
                    writer.said.append(chunk)
                    touched[at] = now
                else:
                    writer.recorded = False
        assert len(records) <= max_streams
        assert records.num_bytes <= max_bytes


def test_a_record_is_kept_for_its_time_and_no_longer() -> None:
    records = StreamRecords(10, 100_000, 60.0)
    begin(records, "a")
    assert records.write([Entry(key("a"), "me", 0.0, 1, b"1")], 50.0) == [WriteOutcome.KEPT]
    assert records.take_over(key("a"), "you", 0.0, 1, 109.0) == [b"x", b"1"]
    assert records.take_over(key("a"), "you", 0.0, 1, 168.0) == [b"x", b"1"], "counted anew"
    assert records.take_over(key("a"), "you", 0.0, 1, 229.0) is None
    assert (len(records), records.num_bytes) == (0, 0)


def test_nobody_elses_stream_is_found() -> None:
    records = StreamRecords(10, 100_000, 60.0)
    begin(records, "a")
    others = [StreamKey("acme", "/v1/completions", "a"), StreamKey("", "/v1/chat/completions", "a"), key("b")]
    assert [records.take_over(other, "you", 0.0, 0, 0.0) for other in others] == [None] * 3
    assert records.write([Entry(key("a"), "me", 0.0, 1, b"1")], 0.0) == [WriteOutcome.KEPT], "and its owner keeps it"


def test_a_client_that_has_seen_more_gets_nothing() -> None:
    records = StreamRecords(10, 100_000, 60.0)
    begin(records, "a")
    assert records.take_over(key("a"), "you", 0.0, 1, 0.0) is None
    assert records.write([Entry(key("a"), "me", 0.0, 2, b"2")], 0.0) == [WriteOutcome.LOST], "a gap"
    assert records.take_over(key("a"), "you", 0.0, 0, 0.0) is None


def test_an_older_request_takes_nothing_from_a_newer_one() -> None:
    """Its first token came later, as its worker was slower. Whoever has resumed the stream is newer than both."""
    records, at = StreamRecords(10, 100_000, 60.0), key("a")
    assert records.write([Entry(at, "newer", 2.0, 0, b"n")], 0.0) == [WriteOutcome.KEPT]
    older = [Entry(at, "older", 1.0, number, b"o") for number in range(2)]
    assert records.write(older, 0.0) == [WriteOutcome.TAKEN] * 2
    assert records.write([Entry(at, "newer", 2.0, 1, b"1")], 0.0) == [WriteOutcome.KEPT]
    assert records.read(at, 1, 0.0) == [b"n", b"1"]
    assert records.take_over(at, "back", 4.0, 1, 0.0) == [b"n", b"1"]
    assert records.write([Entry(at, "between", 3.0, 0, b"b")], 0.0) == [WriteOutcome.TAKEN]
    assert records.write([Entry(at, "newest", 5.0, 0, b"x")], 0.0) == [WriteOutcome.KEPT]
    assert records.read(at, 0, 0.0) == [b"x"]


def test_a_clock_that_was_set_back_takes_no_stream_from_its_client() -> None:
    """Nor does that of another router, which is ahead."""
    clock = [1000.5]
    records, at = StreamRecords(10, 100_000, 60.0, lambda: clock[0]), key("a")
    assert records.write([Entry(at, "me", 1000.0, 0, b"x")], 0.0) == [WriteOutcome.KEPT]
    clock[0] = 946.0
    assert records.take_over(at, "back", 945.0, 0, 1.0) == [b"x"]
    assert records.take_over(at, "older", 944.0, 0, 1.0) is WriteOutcome.TAKEN, "by the same clock"
    assert records.write([Entry(at, "ahead", 1000.0, 0, b"y")], 1.0) == [WriteOutcome.KEPT]
    assert records.write([Entry(at, "newest", 945.5, 0, b"z")], 1.0) == [WriteOutcome.KEPT]


def test_who_came_back_later_keeps_the_stream() -> None:
    """The router of its client's first try was held, and goes on when the second one has the stream."""
    records, at = StreamRecords(10, 100_000, 60.0), key("a")
    begin(records, "a")
    assert records.take_over(at, "second", 20.0, 0, 0.0) == [b"x"]
    assert records.take_over(at, "first", 10.0, 0, 0.0) is WriteOutcome.TAKEN, "not that there is none: it would begin anew"
    assert records.write([Entry(at, "second", 20.0, 1, b"1")], 0.0) == [WriteOutcome.KEPT]


def test_who_only_reads_takes_nothing() -> None:
    records = StreamRecords(10, 100_000, 60.0)
    begin(records, "a")
    assert records.read(key("a"), 0, 0.0) == [b"x"]
    assert records.read(key("a"), 1, 0.0) is None
    assert records.write([Entry(key("a"), "me", 0.0, 1, b"1")], 0.0) == [WriteOutcome.KEPT]
    assert records.read(key("a"), 0, 100.0) is None, "and keeps it no longer"


def test_who_was_taken_over_adds_nothing() -> None:
    records = StreamRecords(10, 100_000, 60.0)
    begin(records, "a")
    assert records.take_over(key("a"), "you", 0.0, 0, 0.0) == [b"x"]
    assert records.write([Entry(key("a"), "me", 0.0, 1, b"1"), Entry(key("a"), "you", 0.0, 1, b"I")], 0.0) == [
        WriteOutcome.TAKEN,
        WriteOutcome.KEPT,
    ]
    begin(records, "a")
    assert records.write([Entry(key("a"), "you", 0.0, 2, b"2")], 0.0) == [WriteOutcome.TAKEN], "begun anew by another"


def test_the_one_that_was_silent_longest_makes_room() -> None:
    records = StreamRecords(2, 100_000, 60.0)
    begin(records, "a", 0.0)
    begin(records, "b", 1.0)
    records.write([Entry(key("a"), "me", 0.0, 1, b"1")], 2.0)
    begin(records, "c", 3.0)
    assert [records.take_over(key(name), "you", 0.0, 0, 3.0) is None for name in "abc"] == [False, True, False]


def of(tenant: str, name: str) -> StreamKey:
    return StreamKey(tenant, "/v1/completions", name)


def test_a_tenant_can_not_push_out_what_another_keeps_within_its_share() -> None:
    for records in (StreamRecords(8, 10**6, 60.0), StreamRecords(10**6, 8 * 600, 60.0)):
        mine = [of("acme", str(number)) for number in range(3)]
        for key in mine:
            assert records.write([Entry(key, "me", 0.0, 0, b"x" * 400)], 0.0) == [WriteOutcome.KEPT]
        for number in range(100):
            outcome = records.write([Entry(of("flood", str(number)), "it", 0.0, 0, b"x" * 400)], 1.0)
            assert outcome == [WriteOutcome.KEPT], "its own oldest makes room"
        assert None not in [records.take_over(key, "you", 0.0, 0, 2.0) for key in mine]
        assert records.take_over(of("flood", "99"), "it", 0.0, 0, 2.0) is not None
        assert records.take_over(of("flood", "0"), "it", 0.0, 0, 2.0) is None


def test_a_newcomer_takes_from_the_one_that_has_most() -> None:
    records = StreamRecords(4, 10**6, 60.0)
    for number in range(4):
        records.write([Entry(of("flood", str(number)), "it", 0.0, 0, b"x")], 0.0)
    for number in range(4):
        assert records.write([Entry(of("acme", str(number)), "me", 0.0, 0, b"x")], 1.0) == [WriteOutcome.KEPT]
    kept = [(tenant, number) for tenant in ("flood", "acme") for number in range(4)]
    kept = [each for each in kept if records.take_over(of(each[0], str(each[1])), "you", 0.0, 0, 2.0) is not None]
    assert kept == [("flood", 2), ("flood", 3), ("acme", 2), ("acme", 3)], "half of it each, and the younger ones"


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 9), st.integers(0, 300)), max_size=80))
def test_an_equal_share_is_safe(writes: list[tuple[str, int, int]]) -> None:
    """Whatever others write, who keeps no more than a third of the room loses nothing."""
    records, kept = StreamRecords(9, 9000, 60.0), dict[StreamKey, int]()
    for tenant, number, size in writes:
        key, mine = of(tenant, str(number)), tenant == "a"
        if mine and (len(kept | {key: 0}) > 3 or sum((kept | {key: size + 100}).values()) > 3000):
            continue
        outcome = records.write([Entry(key, "me", 0.0, 0, b"x" * size)], 0.0)
        if mine:
            assert outcome == [WriteOutcome.KEPT]
            kept[key] = size + 100
        assert all(records.take_over(each, "me", 0.0, 0, 0.0) is not None for each in kept)
        assert len(records) <= 9
        assert records.num_bytes <= 9000


def test_one_stream_can_not_drive_out_all_others() -> None:
    records = StreamRecords(100, 8000, 60.0)
    assert [begin(records, str(number)) for number in range(5)] == [WriteOutcome.KEPT] * 5
    assert begin(records, "large", size=1000) is WriteOutcome.LOST
    assert len(records) == 5


@given(st.lists(st.integers(0, 4), max_size=12), st.data())
def test_events_after_any_id_are_those_that_the_client_lacks(sizes: list[int], data: st.DataObject) -> None:
    def events(seen: EventId) -> list[bytes]:
        ids, made = EventIds(seen), []
        for size in sizes:
            ids.next_piece()
            made += [ids.add(b"data: x\n\n") for _ in range(size)]
        return made

    whole = events(START)
    assert len(set(whole)) == len(whole)
    assert all(whole)
    num_seen = data.draw(st.integers(0, len(whole)))
    last = whole[num_seen - 1].split(b"\n")[0].removeprefix(b"id: ").decode() if num_seen else "0.0"
    assert [event for event in events(EventId.parse(last)) if event] == whole[num_seen:]


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{1,10}\.[0-9]{1,10}", fullmatch=True))
def test_a_last_event_id_is_one_or_an_error(text: str) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert [*EventId.parse(text)] == [int(part) for part in text.split(".")]


@pytest.mark.parametrize("text", ["", "1", "1.", "-1.1", "1.1 ", "\u0661.\u0661", "1" * 10 + ".1"])
def test_what_is_no_event_id(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="last-event-id"):
        EventId.parse(text)

"""Responses and events, however the bytes are cut, against h11 and against plain splitting."""

from __future__ import annotations

from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.http_parser import EventParser, ResponseParser
from protocol.errors import UnavailableError

bodies = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


def response(pieces: list[bytes], kind: str, status: int) -> bytes:
    """As h11 writes it, a server's library with nothing of ours in it."""
    body = b"".join(pieces)
    headers = [("Content-Length", str(len(body)))] if kind == "sized" else [("Connection", "close")] if kind == "close" else []
    connection = h11.Connection(h11.SERVER)
    old = kind == "close"
    connection.receive_data(b"GET / HTTP/1.%d\r\nhost: x\r\n\r\n" % (0 if old else 1))
    assert isinstance(connection.next_event(), h11.Request)
    assert isinstance(connection.next_event(), h11.EndOfMessage)
    data = connection.send(h11.Response(status_code=status, headers=headers)) or b""
    for piece in pieces:
        data += connection.send(h11.Data(data=piece)) or b""
    return data + (connection.send(h11.EndOfMessage()) or b"")


@given(
    pieces=bodies,
    kind=st.sampled_from(["sized", "chunked", "close"]),
    places=st.lists(st.integers(0, 1000), max_size=30),
    status=st.sampled_from([200, 404, 503]),
)
def test_any_cut_gives_the_same_answer(pieces: list[bytes], kind: str, places: list[int], status: int) -> None:
    got: list[bytes] = []
    parser = ResponseParser(got.append)
    for piece in cut(response(pieces, kind, status), places):
        assert not parser.done
        parser.feed(piece)
    if kind == "close":
        parser.eof()
    assert parser.done
    assert (parser.status, b"".join(got)) == (status, b"".join(pieces))
    assert parser.reusable == (kind != "close")


@given(data=st.binary(max_size=200), places=st.lists(st.integers(0, 200), max_size=5), with_head=st.booleans())
def test_garbage_is_refused_and_nothing_worse(data: bytes, places: list[int], with_head: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" if with_head else b""
    parser = ResponseParser(lambda body: None)
    try:
        for piece in cut(head + data, places):
            parser.feed(piece)
        parser.eof()
    except UnavailableError:
        assert not parser.done


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 " + b"a" * 70_000,
    ],
)
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    with pytest.raises(UnavailableError):
        ResponseParser(lambda body: None).feed(data)


def test_an_answer_that_is_cut_off() -> None:
    parser = ResponseParser(lambda body: None)
    parser.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab")
    with pytest.raises(UnavailableError, match="before the end"):
        parser.eof()


def test_interim_answers_and_what_keeps_a_connection() -> None:
    parser = ResponseParser(lambda body: None)
    parser.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")
    assert (parser.status, parser.done, parser.reusable) == (204, True, True)
    parser = ResponseParser(lambda body: None)
    parser.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 0\r\n\r\n")
    assert (parser.done, parser.reusable) == (True, False)
    parser = ResponseParser(lambda body: None)
    parser.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab")
    assert (parser.done, parser.reusable) == (True, False), "a byte too many: who knows what it belongs to"


lines = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20)


@given(
    events=st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6),
    end=st.sampled_from(["\n", "\r\n"]),
    places=st.lists(st.integers(0, 400), max_size=30),
    noise=st.sampled_from(["", ": ping\n\n", "event: x\n", "id: 3\n"]),
)
def test_events_come_out_whole(events: list[list[str]], end: str, places: list[int], noise: str) -> None:
    text = "".join(noise + "".join(f"data: {line}{end}" for line in event) + end for event in events)
    got: list[bytes] = []
    parser = EventParser(got.append)
    for piece in cut(text.encode(), places):
        parser.feed(piece)
    assert got == ["\n".join(event).encode() for event in events]

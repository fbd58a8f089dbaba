"""Answers that are unlike OpenAI's: reasoning by either name counts, and what makes no sense fails one request alone."""

from __future__ import annotations

import json

import pytest

from loadtest.cache_shares import cache_figures
from loadtest.http_client import StatusError
from loadtest.records import RequestRecord
from loadtest.server import AnswerWatch

USAGE = {"prompt_tokens": 4, "completion_tokens": 2}


def watched(*events: str) -> RequestRecord:
    """The record of an answer of these events, the first one a second after the request."""
    record = RequestRecord(0, 4, 64, 0.0)
    watch = AnswerWatch(record, 100.0)
    for number, event in enumerate(events):
        watch.push(101.0 + number, event.encode())
    watch.push(200.0, b"[DONE]")
    watch.end()
    return record


def answered(usage: str) -> RequestRecord:
    return watched('{"choices":[{"text":"hi","finish_reason":"stop"}]}', f'{{"choices":[],"usage":{usage}}}')


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_an_answer_by_either_name(name: str) -> None:
    thoughts = [f'{{"choices":[{{"delta":{{"{name}":"hm"}}}}]}}'] * 3
    record = watched(*thoughts, '{"choices":[{"delta":{},"finish_reason":"length"}]}')
    assert record.error is None
    assert (record.ttft, record.itl, record.completion_tokens) == (1.0, [1.0, 1.0], 3)


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        ('{"prompt_tokens":4,"completion_tokens":1e999}', "completion_tokens"),
        ('{"prompt_tokens":4,"completion_tokens":-5}', "completion_tokens"),
        ('{"prompt_tokens":4,"completion_tokens":1' + "0" * 400 + "}", "completion_tokens"),
        ('{"prompt_tokens":NaN,"completion_tokens":2}', "prompt_tokens"),
        (json.dumps({**USAGE, "prompt_tokens_details": {"cached_tokens": "3"}}), "cached_tokens"),
        (json.dumps({**USAGE, "prompt_tokens_details": [1]}), "usage"),
        (json.dumps({**USAGE, "times": [{"stages": {"prefill": float("nan")}}]}), "prefill"),
        (json.dumps({**USAGE, "times": [{"stages": {"prefill": 1e300}}]}), "prefill"),
        ("[1]", "usage"),
    ],
)
def test_a_usage_that_makes_no_sense_fails_its_request_alone(usage: str, words: str) -> None:
    record, other = answered(usage), answered(json.dumps(USAGE | {"prompt_tokens_details": {"cached_tokens": 3}}))
    assert record.error is not None
    assert words in record.error
    assert other.ok
    assert cache_figures([record, other]) == {"total_cached_tokens": 3, "cached_share": 0.75}
    json.dumps(record.server_times, allow_nan=False)


def test_an_error_of_null_is_none() -> None:
    assert watched('{"choices":[{"text":"hi","finish_reason":"stop"}],"error":null}').ok


def test_a_refusal_that_is_nested_too_deeply_is_told_by_its_beginning() -> None:
    assert StatusError(500, b"[" * 100_000).message == f"500: {'[' * 200}"


@pytest.mark.parametrize(
    ("event", "words"), [("[" * 100_000, "Recursion"), ('{"error":"overloaded"}', "overloaded"), ("<html>", "JSONDecodeError")]
)
def test_an_event_that_makes_no_sense_fails_its_request(event: str, words: str) -> None:
    assert words in str(watched(event).error)

"""Whatever pieces an answer comes in, the `openai` package puts its events together to the response at their end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from protocol.errors import OverloadedError, WorkerLostError
from router.api.responses.body import LOGPROBS, ResponsesBody
from router.api.responses.builder import ResponseBuilder
from router.dispatch.journal import Guesses
from router.request.answer import Delta, Finish, TextLogprob, TextLogprobs, TokenText
from router.text.tool_calls import ToolCallDelta

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENTRY = TextLogprobs(TextLogprob(TokenText("t", (116,)), -0.5), ())

texts = st.lists(st.text(max_size=3), max_size=4)
arguments = st.lists(st.text(min_size=1, max_size=3), max_size=3)
finishes: st.SearchStrategy[Finish | None] = st.sampled_from(["stop", "length", "tool_calls", None])


def delta(text: str = "", calls: tuple[ToolCallDelta, ...] = (), finish: Finish | None = None) -> Delta:
    return Delta(0, text, (1,), (ENTRY,), finish, 0, calls)


def pieces(said: list[str], calls: list[list[str]], finish: Finish | None) -> list[Delta]:
    """Text, then calls, then an end; None is an error. The last piece may say something too."""
    deltas = [delta(text) for text in said]
    for index, parts in enumerate(calls):
        deltas.append(delta(calls=(ToolCallDelta(index, f"call_{index}", "f", ""),)))
        deltas += [delta(calls=(ToolCallDelta(index, None, None, part),)) for part in parts]
    return deltas if finish is None else [*deltas, delta(finish=finish)]


@given(texts, st.lists(arguments, max_size=3), finishes, st.booleans())
def test_events_add_up(said: list[str], calls: list[list[str]], finish: Finish | None, logprobs: bool) -> None:
    body = ResponsesBody(model="m", input="i", include=[LOGPROBS] if logprobs else [])
    builder = ResponseBuilder("x", "m", body, 5)
    events = builder.begin()
    for piece in pieces(said, calls, finish):
        events += builder.push(piece)
    if finish is None:
        events += builder.fail(WorkerLostError("gone"))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    open_items: set[int] = set()
    for event in events:
        state.handle_event(EVENT.validate_python(event))
        if event["type"] == "response.output_item.added":
            assert not open_items
            open_items.add(event["output_index"])
        elif event["type"] == "response.output_item.done":
            open_items.remove(event["output_index"])
        elif "output_index" in event:
            assert open_items == {event["output_index"]}
    assert open_items == set() or finish is None

    response = Response.model_validate(builder.response)
    expected = {None: "failed", "length": "incomplete"}.get(finish, "completed")
    assert response.status == events[-1]["response"]["status"] == expected
    assert events[-1]["type"] == f"response.{expected}"
    assert response.output_text == "".join(said)
    found = [item.arguments for item in response.output if item.type == "function_call"]
    assert found == ["".join(parts) for parts in calls]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == builder.response["output"][: len(done)]
    if finish is not None:
        assert len(done) == len(response.output) > 0
        assert builder.response["usage"]["output_tokens"] == len(pieces(said, calls, finish))


def test_a_whole_call_is_completed_though_the_answer_is_cut() -> None:
    """The limit may fall behind the call's closing brace; a client runs completed calls alone."""
    cut = ['{"a": 1', "", "[1]", '{"a":' + "[" * 5000]
    for arguments, status in [('{"a": 1}', "completed"), *((text, "incomplete") for text in cut)]:
        builder = ResponseBuilder("x", "m", ResponsesBody(model="m", input="i"), 5)
        for piece in pieces([], [[arguments]], "length"):
            events = builder.push(piece)
        assert [item["status"] for item in builder.response["output"]] == [status]
        assert [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"] == [status]
        assert builder.response["status"] == "incomplete"


@given(texts, st.booleans())
def test_logprobs_of_a_message_are_all_there_once(said: list[str], calls: bool) -> None:
    body = ResponsesBody(model="m", input="i", include=[LOGPROBS])
    builder = ResponseBuilder("x", "m", body, 5)
    deltas = pieces(said, [["a"]] if calls else [], "stop")
    events = [event for piece in deltas for event in builder.push(piece)]
    told = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    messages = [item for item in builder.response["output"] if item["type"] == "message"]
    assert told == [entry for item in messages for entry in item["content"][0]["logprobs"]]
    if calls:
        assert len(told) <= len(said), "what spells a call is no text"
    else:
        assert len(told) == len(deltas)


def test_guessed_tokens_are_told_to_who_asks() -> None:
    for asked in (False, True):
        body = ResponsesBody(model="m", input="i", include_predictions=asked)
        builder = ResponseBuilder("x", "m", body, 5)
        builder.push(replace(delta("a"), guesses=Guesses(4, 3)))
        builder.push(replace(delta("b", finish="stop"), guesses=Guesses(2, 0)))
        predicted = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 3} if asked else {}
        assert builder.response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0} | predicted


def test_a_rate_limit_on_the_way_is_called_one() -> None:
    builder = ResponseBuilder("x", "m", ResponsesBody(model="m", input="i"), 5)
    [failed] = builder.fail(OverloadedError("full"))
    assert failed["response"]["error"] == {"code": "rate_limit_exceeded", "message": "full"}

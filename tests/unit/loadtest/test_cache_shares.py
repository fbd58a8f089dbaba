"""What was cached of what could be, against prompts that are spelled out token by token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.cache_shares import cache_figures, conversation_figures, note_reusable
from loadtest.conversations import Conversation, SystemPrompt, Turn
from loadtest.records import RequestRecord, TurnRecord
from tests.unit.loadtest.openai_server import shared

lengths = st.integers(1, 9)
times = st.integers(1, 9).map(float)
NUM_TURNS = 3
TURNS = (Turn("why", 1, 4, 0.0),) * NUM_TURNS


@dataclass
class Sent:
    """A question that was sent, with the tokens of its prompt and of its answer."""

    record: TurnRecord
    prompt: list[int]
    answer: list[int]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Sent], list[Conversation]]:
    """Conversations, some of which end early. No two questions or answers have a token in common."""
    tokens = itertools.count()
    systems = [take(tokens, draw(lengths)) for _ in range(draw(st.integers(0, 2)))]
    prompts = [SystemPrompt(number, "", len(system)) for number, system in enumerate(systems)]
    conversations, sent = [], []
    for number in range(draw(st.integers(1, 5))):
        which = draw(st.sampled_from(range(len(systems)))) if systems else None
        conversations.append(Conversation(None if which is None else prompts[which], TURNS))
        said, at_sent = [] if which is None else list(systems[which]), draw(times)
        for index in range(NUM_TURNS):
            each = turn(draw, tokens, said, number, index, at_sent)
            sent.append(each)
            if not each.record.ok:
                break
            said, at_sent = [*each.prompt, *each.answer], at_sent + each.record.e2el + draw(times)
    return sent, conversations


def turn(draw: st.DrawFn, tokens: Iterator[int], said: list[int], number: int, index: int, at_sent: float) -> Sent:
    prompt, answer, ttft = [*said, *take(tokens, draw(lengths))], take(tokens, draw(lengths)), draw(times)
    record = TurnRecord(0, 1, 9, at_sent, at_sent, at_sent, conversation_id=number, turn_index=index)
    fate = draw(st.sampled_from(["answered"] * 4 + ["cut", "refused"]))
    if fate != "refused":
        record.ttft, record.e2el = ttft, ttft + draw(times)
    record.error = None if fate == "answered" else "broken"
    record.prompt_tokens, record.completion_tokens = len(prompt), len(answer)
    record.cached_tokens = draw(st.one_of(st.none(), st.integers(0, len(prompt))))
    return Sent(record, prompt, answer)


def take(tokens: Iterator[int], num: int) -> list[int]:
    return list(itertools.islice(tokens, num))


def could_be_cached(one: Sent, sent: list[Sent]) -> int:
    """The longest beginning that a request before it had computed."""
    records = [(each, each.record.at_sent + each.record.ttft) for each in sent if each.record.ttft is not None]
    earlier = [[*each.prompt, *each.answer] for each, computed_at in records if computed_at <= one.record.at_sent]
    return max((shared(one.prompt, each) for each in earlier), default=0)


@given(runs(), st.randoms())
def test_what_could_be_cached(run: tuple[list[Sent], list[Conversation]], shuffling: random.Random) -> None:
    sent, conversations = run
    records = [each.record for each in sent]
    shuffling.shuffle(records)
    note_reusable(records, conversations)
    for one in sent:
        assert one.record.reusable_tokens == could_be_cached(one, sent)


@given(runs())
def test_shares_add_up(run: tuple[list[Sent], list[Conversation]]) -> None:
    sent, conversations = run
    records = [each.record for each in sent]
    note_reusable(records, conversations)
    figures = conversation_figures(records, conversations) | cache_figures(records)
    done = [record for record in records if record.ok]
    told = any(record.cached_tokens is not None for record in done)
    if told:
        cached = sum(record.cached_tokens or 0 for record in done)
        assert figures["total_cached_tokens"] == cached
        assert figures["cached_share"] == pytest.approx(cached / sum(record.prompt_tokens or 0 for record in done))
        assert figures["cached_of_reusable"] is None or 0 <= figures["cached_of_reusable"] <= 1
    else:
        assert figures["total_cached_tokens"] is figures["cached_share"] is figures["cached_of_reusable"] is None
    turns = figures["per_turn_metrics"]
    assert [each["turn_index"] for each in turns] == list(range(NUM_TURNS))
    for name, whole in (("completed", len(done)), ("num_samples", len(records))):
        assert sum(each[name] for each in turns) == whole
    for name in ("total_cached_tokens", "total_reusable_tokens"):
        assert sum(each[name] or 0 for each in turns) == (figures[name] or 0)
    ended_early = {record.conversation_id for record in records if not record.ok}
    assert figures["conversations_failed"] == len(ended_early)
    assert figures["conversations_completed"] == len(conversations) - len(ended_early)
    assert figures["turns_not_sent"] == NUM_TURNS * len(conversations) - len(records)


def answered(cached: int | None, prompt: int = 10) -> RequestRecord:
    return RequestRecord(0, 8, 4, 0.0, ttft=0.1, prompt_tokens=prompt, cached_tokens=cached, completion_tokens=4)


def test_single_prompts_have_a_share_where_the_server_tells_it() -> None:
    assert cache_figures([answered(None), answered(None)]) == {"total_cached_tokens": None, "cached_share": None}
    assert cache_figures([]) == {"total_cached_tokens": None, "cached_share": None}
    failed = RequestRecord(1, 8, 4, 0.0, error="429")
    assert cache_figures([answered(5), answered(0), failed]) == {"total_cached_tokens": 5, "cached_share": 0.25}
    assert cache_figures([answered(5), answered(None)])["cached_share"] == 0.25, "vLLM leaves a zero out"


def test_times_of_turns() -> None:
    records = [TurnRecord(0, 8, 4, 0.0, ttft=ttft, turn_index=0, reusable_tokens=0) for ttft in (0.1, 0.3)]
    [turn] = conversation_figures(records, [Conversation(None, TURNS[:1])] * 2)["per_turn_metrics"]
    assert turn["p50_ttft_ms"] == turn["mean_ttft_ms"] == pytest.approx(200)
    assert turn["p99_ttft_ms"] == pytest.approx(298)

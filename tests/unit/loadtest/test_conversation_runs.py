"""Conversations held with a server over real sockets: what is sent, when, what ends them, and what comes out."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest import plots, report
from loadtest.bench import Finished, run_bench
from loadtest.options import BenchOptions
from loadtest.records import TurnRecord
from protocol.errors import InvalidRequestError
from tests.unit.loadtest.openai_server import OpenAiServer

OPTIONS = BenchOptions(
    base_url="http://127.0.0.1:1",
    backend="chat",
    multi_turn=True,
    multi_turn_num_turns=3,
    num_prompts=4,
    random_input_len=6,
    per_turn_input_len=3,
    random_output_len=2,
    system_prompt_len=5,
    timeout_s=20.0,
)


def bench(server: OpenAiServer, **options: Any) -> tuple[Finished, list[TurnRecord]]:
    async def main() -> Finished:
        async with asyncio.timeout(60), server.serving():
            wanted = dataclasses.replace(OPTIONS, base_url=server.url, **options)
            return await run_bench(wanted, lambda text: None, lambda num: None, lambda record: None)

    finished = asyncio.run(main())
    return finished, [record for record in finished.records if isinstance(record, TurnRecord)]


def test_each_question_comes_with_all_that_was_said() -> None:
    server = OpenAiServer()
    _, turns = bench(server, multi_turn_concurrency=1)
    assert [(turn.conversation_id, turn.turn_index) for turn in turns] == [(i, j) for i in range(4) for j in range(3)]
    assert [turn.index for turn in turns] == list(range(12))
    chats = [[body["messages"] for body in server.bodies[begin : begin + 3]] for begin in range(0, 12, 3)]
    for chat in chats:
        assert [message["role"] for message in chat[0]] == ["system", "user"]
        assert [len(message["content"].split()) for message in chat[0]] == [5, 6]
        for before, after in itertools.pairwise(chat):
            assert after[:-2] == before
            assert after[-2] == {"role": "assistant", "content": " x x"}
            assert len(after[-1]["content"].split()) == 3
    assert len({chat[0][0]["content"] for chat in chats}) == 1, "one system prompt for all"
    assert len({message["content"] for chat in chats for message in chat[-1] if message["role"] == "user"}) == 12


def test_system_prompts_are_taken_in_turn() -> None:
    server = OpenAiServer()
    bench(server, multi_turn_concurrency=1, num_system_prompts=2, multi_turn_num_turns=1, per_turn_input_len=None)
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert prompts[:2] == prompts[2:]
    assert prompts[0] != prompts[1]
    alone = OpenAiServer()
    bench(alone, system_prompt_len=0)
    assert {message["role"] for body in alone.bodies for message in body["messages"]} == {"user", "assistant"}


def test_all_that_could_be_cached_is_so_with_a_cache_that_forgets_nothing() -> None:
    server = OpenAiServer(has_cache=True, tells_zero=False)
    finished, turns = bench(server, multi_turn_concurrency=1)
    figures = finished.figures
    assert figures["total_cached_tokens"] == sum(told(usage) for usage in server.usages)
    assert figures["total_input_tokens"] == sum(usage["prompt_tokens"] for usage in server.usages)
    assert figures["cached_share"] == figures["total_cached_tokens"] / figures["total_input_tokens"]
    assert figures["cached_of_reusable"] == 1.0
    first, second, third = figures["per_turn_metrics"]
    assert [turn.reusable_tokens for turn in turns if turn.turn_index == 0] == [0, 5, 5, 5]
    for number, turn in enumerate((second, third), start=1):
        usages = server.usages[number::3]
        assert turn["total_cached_tokens"] == turn["total_reusable_tokens"] == sum(told(usage) for usage in usages)
        assert turn["cached_share"] == turn["total_cached_tokens"] / sum(usage["prompt_tokens"] for usage in usages)
    assert first["cached_share"] < second["cached_share"] < third["cached_share"]
    assert (figures["conversations_completed"], figures["conversations_failed"], figures["turns_not_sent"]) == (4, 0, 0)


def told(usage: dict[str, Any]) -> int:
    cached: int = usage.get("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"]
    return cached


def test_a_system_prompt_can_not_be_cached_before_it_was_computed() -> None:
    _, turns = bench(OpenAiServer(has_cache=True, first_s=0.2))
    assert [turn.reusable_tokens for turn in turns if turn.turn_index == 0] == [0, 0, 0, 0], "all began at once"


def test_a_failed_question_ends_its_conversation() -> None:
    server = OpenAiServer(refused=frozenset({1}))
    finished, turns = bench(server, multi_turn_concurrency=1, goodput=["ttft:10000"])
    assert [(turn.conversation_id, turn.turn_index) for turn in turns if not turn.ok] == [(0, 1)]
    assert len(turns) == len(server.bodies) == 11
    figures = finished.figures
    assert (figures["completed"], figures["failed"]) == (10, 1)
    assert (figures["conversations_completed"], figures["conversations_failed"], figures["turns_not_sent"]) == (3, 1, 1)
    assert [turn["failed"] for turn in figures["per_turn_metrics"]] == [0, 1, 0]
    assert figures["goodput_attainment"] == pytest.approx(10 / 11), "of those that were sent"
    said = printed(finished)
    assert "500: full" in said
    assert "failed 1 times" in said


def test_think_time_counts_from_the_answer() -> None:
    server = OpenAiServer(first_s=0.05)
    finished, turns = bench(server, num_prompts=2, multi_turn_delay_ms=150.0)
    for before, after in itertools.pairwise(turns):
        if after.turn_index:
            assert after.at_planned - (before.at_sent + before.e2el) == pytest.approx(0.15, abs=0.05 + server.held_s)
            assert 0 <= after.lateness < 0.1 + server.held_s
    assert finished.client.p99_lateness < 0.1 + server.held_s


def test_so_many_conversations_and_so_many_requests_at_a_time() -> None:
    server = OpenAiServer(first_s=0.03)
    finished, turns = bench(server, num_prompts=6, multi_turn_concurrency=3, max_concurrency=2, multi_turn_delay_ms=20.0)
    assert server.most_at_once == 2
    begins = {turn.conversation_id: turn.at_sent for turn in turns if turn.turn_index == 0}
    ends = {turn.conversation_id: turn.at_sent + turn.e2el for turn in turns if turn.turn_index == 2}
    assert all(sum(begins[each] <= at < ends[each] for each in begins) <= 3 for at in begins.values())
    assert finished.figures["mean_planned_ttft_ms"] > finished.figures["mean_ttft_ms"] + 20
    assert "Longest wait for max-concurrency and multi-turn-concurrency" in printed(finished)


def test_conversations_begin_at_a_rate_whatever_becomes_of_those_before() -> None:
    server = OpenAiServer(first_s=0.5)
    _, turns = bench(server, num_prompts=20, request_rate=100.0, multi_turn_num_turns=2)
    begins = [turn.at_sent for turn in turns if turn.turn_index == 0]
    assert begins == sorted(begins)
    assert begins[-1] == pytest.approx(0.2, abs=0.2 + server.held_s), "before the first answer is there"


def test_warm_ups_have_nothing_of_the_run() -> None:
    server = OpenAiServer(has_cache=True)
    finished, turns = bench(server, num_warmups=3)
    assert len(turns) == 12
    assert [[message["role"] for message in body["messages"]] for body in server.bodies[:3]] == [["user"]] * 3
    warm, run = ({body["messages"][-1]["content"] for body in bodies} for bodies in (server.bodies[:3], server.bodies[3:]))
    assert not warm & run
    assert finished.figures["num_conversations"] == 4


@pytest.mark.slow
def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"word{number}" for number in range(200)))
    text = {"dataset_name": "text", "dataset_path": path}
    asked = []
    for options in (
        {"seed": 3},
        {"seed": 3, "multi_turn_delay_ms": 5.0},
        {"seed": 4},
        {"seed": 3, **text},
        {"seed": 4, **text},
    ):
        server = OpenAiServer()
        bench(server, multi_turn_concurrency=1, num_prompts=2, **options)
        asked.append([body["messages"] for body in server.bodies])
    assert asked[0] == asked[1] != asked[2]
    assert asked[3] != asked[4]
    assert all(word.startswith("word") for word in asked[3][0][0]["content"].split())


def test_what_is_said_saved_and_drawn(tmp_path: Path) -> None:
    finished, _ = bench(OpenAiServer(has_cache=True, owned_by="tandem"), multi_turn_concurrency=1)
    said = printed(finished)
    for words in ("Turn by turn", "Prompt tokens that were cached", "Cached, of reusable prompt tokens", "100.0%"):
        assert words in said
    saved = json.loads(report.save_json(finished, tmp_path, None).read_text())
    assert [turn["turn_index"] for turn in saved["per_turn_metrics"]] == [0, 1, 2]
    assert all(turn["p99_ttft_ms"] >= turn["p50_ttft_ms"] > 0 for turn in saved["per_turn_metrics"])
    assert saved["requests"][4]["reusable_tokens"] == saved["requests"][4]["cached_tokens"] > 0
    assert (saved["num_prompts"], saved["options"]["multi_turn_num_turns"], len(saved["requests"])) == (4, 3, 12)
    plots.plot(finished, tmp_path / "plot.png")


def test_a_server_that_does_not_tell_what_is_cached() -> None:
    finished, _ = bench(OpenAiServer())
    assert finished.figures["cached_share"] is finished.figures["cached_of_reusable"] is None
    assert "cached" in printed(finished), "the columns are there"
    assert "Prompt tokens that were cached" not in printed(finished)


def printed(finished: Finished) -> str:
    console = Console(record=True, width=160)
    report.print_report(finished, console)
    return console.export_text()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"backend": "completions"}, "backend"),
        ({"dataset_name": "sharegpt", "dataset_path": Path("x")}, "dataset_name"),
        ({"random_prefix_len": 3}, "random_prefix_len"),
        ({"random_input_len": 0}, "random_input_len"),
        ({"random_output_len": 0}, "random_output_len"),
        ({"random_range_ratio": 1.0}, "random_range_ratio"),
        ({"per_turn_input_len": 0}, "per_turn_input_len"),
        ({"multi_turn_num_turns": 0}, "multi_turn_num_turns"),
        ({"multi_turn_num_turns": 1}, "per_turn_input_len"),
        ({"multi_turn_num_turns": 1, "per_turn_input_len": None, "multi_turn_delay_ms": 1.0}, "multi_turn_delay_ms"),
        ({"multi_turn_delay_ms": -1.0}, "multi_turn_delay_ms"),
        ({"multi_turn_delay_ms": float("nan")}, "multi_turn_delay_ms"),
        ({"multi_turn_delay_kind": "exponential"}, "multi_turn_delay_kind"),
        ({"multi_turn_concurrency": 0}, "multi_turn_concurrency"),
        ({"system_prompt_len": -1}, "system_prompt_len"),
        ({"num_system_prompts": 0}, "num_system_prompts"),
        ({"num_system_prompts": 5}, "num_system_prompts"),
        ({"num_system_prompts": 2, "system_prompt_len": 0}, "system_prompt_len"),
    ],
)
def test_flags_that_can_not_work(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        dataclasses.replace(OPTIONS, **fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"multi_turn_num_turns": 2},
        {"multi_turn_concurrency": 2},
        {"multi_turn_delay_ms": 5.0},
        {"multi_turn_delay_kind": "exponential"},
        {"per_turn_input_len": 5},
        {"num_system_prompts": 2},
        {"system_prompt_len": 5},
    ],
)
def test_flags_of_conversations_need_conversations(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="--multi-turn") as error:
        BenchOptions(**fields)
    assert error.value.param in fields

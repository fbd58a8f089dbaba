"""Whole runs against a server over real sockets: pace, faults, what is sent, what comes out."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from loadtest import plots, report
from loadtest.bench import Finished, run_bench
from loadtest.options import BenchOptions
from loadtest.runner import ClientHealth
from protocol.errors import InvalidRequestError, UnavailableError
from tests.unit.loadtest.openai_server import OpenAiServer

OPTIONS = BenchOptions(
    base_url="http://127.0.0.1:1",
    random_input_len=6,
    random_output_len=5,
    num_prompts=4,
    metric_percentiles="50,99",
    timeout_s=20.0,
)


def bench(server: OpenAiServer, **options: Any) -> Finished:
    async def main() -> Finished:
        async with asyncio.timeout(60), server.serving():
            wanted = dataclasses.replace(OPTIONS, base_url=server.url, **options)
            return await run_bench(wanted, lambda text: None, lambda planned: None, lambda record: None)

    return asyncio.run(main())


def test_a_slow_server_does_not_slow_the_load() -> None:
    server = OpenAiServer(first_s=1.0)
    finished = bench(server, num_prompts=40, request_rate=100.0)
    assert server.most_at_once == 40, "all were sent before the first one was answered"
    sent = [record.at_sent for record in finished.records]
    assert sent == sorted(sent)
    assert sent[-1] == pytest.approx(0.4, abs=0.3 + server.held_s)
    assert finished.figures["completed"] == 40


def test_times_are_the_servers() -> None:
    server = OpenAiServer(first_s=0.2, gap_s=0.05)
    finished = bench(server, num_prompts=3)
    for record in finished.records:
        assert record.ttft == pytest.approx(0.2, abs=0.1 + server.held_s)
        assert len(record.itl) == 4
        assert record.tpot == pytest.approx(0.05, abs=0.04 + server.held_s)
        assert record.ttft is not None
        assert record.e2el == pytest.approx(record.ttft + sum(record.itl), abs=0.03)
        assert (record.prompt_tokens, record.completion_tokens, record.finish_reason) == (7, 5, "length")


def test_max_concurrency_holds_and_its_wait_is_told() -> None:
    server = OpenAiServer(first_s=0.1)
    finished = bench(server, num_prompts=6, max_concurrency=2)
    assert server.most_at_once == 2
    assert server.connections <= 3, "connections are used again"
    figures = finished.figures
    assert figures["mean_planned_ttft_ms"] > figures["mean_ttft_ms"] + 50
    assert finished.client.p99_lateness < 0.1 + server.held_s, "the wait for others is not the client's lateness"


def test_a_chats_opening_role_is_no_token() -> None:
    server = OpenAiServer(gap_s=0.02)
    finished = bench(server, backend="chat", endpoint="/v1/chat/completions", ignore_eos=True)
    assert all(len(record.itl) == 4 for record in finished.records)
    assert server.bodies[0]["ignore_eos"] is True
    assert len(server.bodies[0]["messages"][0]["content"].split()) == 6
    assert "include_times" not in server.bodies[0]


def test_token_ids_where_the_server_tells_its_own() -> None:
    server = OpenAiServer(has_tokenizer=True)
    finished = bench(server)
    assert finished.unit == "tokens"
    assert all(len(body["prompt"]) == 6 and isinstance(body["prompt"][0], int) for body in server.bodies)
    assert bench(OpenAiServer()).unit == "words"


def test_warm_ups_are_other_prompts_and_not_counted() -> None:
    server = OpenAiServer()
    finished = bench(server, num_warmups=3)
    assert (len(server.bodies), len(finished.records)) == (7, 4)
    assert len({str(body["prompt"]) for body in server.bodies}) == 7


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"status": 429}, "429: full"),
        ({"cut_after": 2}, "closed the connection"),
        ({"error_event": True}, "the worker is gone"),
    ],
)
def test_failures_are_misses_with_their_reason(faults: dict[str, Any], words: str) -> None:
    finished = bench(OpenAiServer(**faults), goodput=["ttft:1000"])
    assert finished.figures["failed"] == 4
    assert finished.figures["goodput_attainment"] == 0.0
    assert all(words in str(record.error) for record in finished.records)


def test_an_answer_that_never_ends() -> None:
    began = time.monotonic()
    finished = bench(OpenAiServer(first_s=50), timeout_s=0.3, num_prompts=1)
    assert time.monotonic() - began < 10
    assert finished.records[0].error == "no end of the answer within 0.3 s"


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match="no connection"):
        asyncio.run(run_bench(OPTIONS, lambda text: None, lambda planned: None, lambda record: None))
    with pytest.raises(UnavailableError, match="no warm-up request got an answer: 503"):
        bench(OpenAiServer(status=503), num_warmups=1)


_NO_URLS = ("ftp://x", "http://", "http://x:0", "http://x:eight", "http://[::1", "http://a..b", "http://ü..x")
_NO_PATHS = ("/a b", "/a\r\nx: y", "/a\0", "/\udcff")


@pytest.mark.parametrize("url", [*_NO_URLS, *(f"http://127.0.0.1:1{path}" for path in _NO_PATHS)])
def test_what_is_no_base_url(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="base URL"):
        asyncio.run(run_bench(dataclasses.replace(OPTIONS, base_url=url), lambda t: None, lambda p: None, lambda r: None))


@pytest.mark.parametrize("path", [*_NO_PATHS, "v1"])
def test_what_is_no_endpoint(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="endpoint is a path, without blanks") as refused:
        dataclasses.replace(OPTIONS, endpoint=path)
    assert refused.value.param == "endpoint"


def test_traces_keep_their_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 400 * i, "input_length": 600, "output_length": 40, "hash_ids": [1, i]} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = OpenAiServer(has_tokenizer=True)
    options = {"dataset_name": "mooncake", "dataset_path": path, "num_prompts": 3}
    finished = bench(server, **options, length_scale=8.0, time_scale=0.5)
    assert [record.at_planned for record in finished.records] == pytest.approx([0.0, 0.2, 0.4])
    assert [len(body["prompt"]) for body in server.bodies] == [75, 75, 75]
    assert server.bodies[0]["prompt"][:64] == server.bodies[2]["prompt"][:64]
    assert (finished.as_json()["length_scale"], finished.as_json()["time_scale"]) == (8.0, 0.5)


def test_sharegpt_has_its_own_lengths(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    chats = [{"conversations": [{"value": f"What is {i}?"}, {"value": "A number it is"}]} for i in range(9)]
    path.write_text(json.dumps(chats))
    server = OpenAiServer(has_tokenizer=True)
    finished = bench(server, dataset_name="sharegpt", dataset_path=path)
    assert {(record.prompt_len, record.output_len) for record in finished.records} == {(3, 4)}
    assert all(body["prompt"].startswith("What is") for body in server.bodies)


def test_a_long_text_is_tokenized_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    text = "Call me Ishmael.\n" * 20_000 + "a" * 100_000
    path.write_text(text)
    server = OpenAiServer(has_tokenizer=True)
    finished = bench(server, dataset_name="text", dataset_path=path)
    assert finished.unit == "tokens"
    assert all({*body["prompt"]} <= {7, 9, 13, 5 + 65_536, 5 + 100_000 - 65_536} for body in server.bodies), "no word is cut"
    assert "".join(server.texts[1:]) == text


@pytest.mark.parametrize("dataset", ["sharegpt", "text"])
@pytest.mark.parametrize("busy_at", [0, 1])
def test_a_tokenizer_that_is_busy_does_not_turn_tokens_into_words(tmp_path: Path, dataset: str, busy_at: int) -> None:
    path = tmp_path / "data"
    turns = [{"value": "What is it?"}, {"value": "A number it is"}]
    path.write_text(json.dumps([{"conversations": turns}] * 9))
    with pytest.raises(UnavailableError, match="429: busy"):
        bench(OpenAiServer(has_tokenizer=True, busy_at=busy_at), dataset_name=dataset, dataset_path=path)


def test_prompts_to_copy_from_need_no_file_and_may_have_one(tmp_path: Path) -> None:
    server = OpenAiServer(has_tokenizer=True)
    bench(server, dataset_name="copy", num_prompts=3, random_output_len=7, temperature=0.5)
    assert [body["max_tokens"] for body in server.bodies] == [7, 7, 7]
    assert [body["temperature"] for body in server.bodies] == [0.5, 0.5, 0.5]
    assert "word for word" in server.bodies[0]["prompt"]
    path = tmp_path / "own.txt"
    path.write_text("My own words.\n\nAnd others.\n\nAnd the last ones.")
    own = OpenAiServer(has_tokenizer=True)
    bench(own, dataset_name="copy", dataset_path=path, num_prompts=1)
    assert any(words in own.bodies[0]["prompt"] for words in ("My own words", "the last ones"))


def test_what_was_cached_where_the_server_tells_it() -> None:
    server = OpenAiServer(has_cache=True)
    finished = bench(server, random_prefix_len=10, max_concurrency=1)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in server.usages)
    assert finished.figures["total_cached_tokens"] == cached > 0
    assert finished.figures["cached_share"] == cached / finished.figures["total_input_tokens"]
    console = Console(record=True, width=120)
    report.print_report(finished, console)
    assert f"{cached} (" in console.export_text()


def test_what_is_said_saved_and_drawn(tmp_path: Path) -> None:
    server = OpenAiServer(owned_by="tandem", gap_s=0.005)
    finished = bench(server, goodput=["ttft:1000", "tpot:0.001"], request_rate=50.0)
    assert server.bodies[0]["include_times"] is True
    console = Console(record=True, width=120)
    report.print_report(finished, console)
    text = console.export_text()
    assert "Where the time went" in text
    assert "75.0%" in text
    assert "Goodput" in text
    saved = json.loads(report.save_json(finished, tmp_path / "new", None).read_text())
    assert saved["completed"] == 4
    assert saved["p99_ttft_ms"] >= saved["p50_ttft_ms"] > 0
    assert len(saved["requests"]) == 4
    assert saved["cached_share"] is None, "this server does not tell"
    assert not {"per_turn_metrics", "num_conversations", "turn_index"} & (saved.keys() | saved["requests"][0].keys())
    assert saved["requests"][0]["server_times"] == {"queue": 0.25, "decode_step": 0.75}
    assert "small" in next((tmp_path / "new").iterdir()).name
    plots.plot(finished, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidRequestError, match=r"\.png"):
        plots.check_plot(tmp_path / "plot.pdf")


def test_a_result_without_limits_is_saved_and_drawn(tmp_path: Path) -> None:
    flags = {"timeout_s": math.inf, "goodput": ["ttft:inf", "tpot:50"], "burstiness": math.inf, "request_rate": 500.0}
    finished = bench(OpenAiServer(), **flags)
    options = json.loads(report.save_json(finished, tmp_path, "result.json").read_text())["options"]
    assert (options["timeout_s"], options["burstiness"], options["request_rate"]) == ("inf", "inf", 500.0)
    assert options["goodput"] == {"ttft": "inf", "tpot": 50.0}
    plots.plot(finished, tmp_path / "plot.png")


def test_nobody_commands_the_terminal() -> None:
    evil = "a\x1b]0;title\x07b\x9b31mc"
    finished = bench(OpenAiServer(owned_by="tandem"), model=evil)
    finished.stages = {evil: finished.stages["queue"]}
    finished.records[0].error = evil
    file = io.StringIO()
    report.print_report(finished, Console(file=file, width=120))
    assert file.getvalue().count("a]0;titleb31mc") == 3
    assert {char for char in file.getvalue() if not char.isprintable()} == {"\n"}


def test_what_others_say_is_printed_as_it_is() -> None:
    finished = bench(OpenAiServer(owned_by="tandem"), model="mine[/x]")
    finished.stages = {"[/queue]": finished.stages["queue"]}
    first, second, *_ = finished.records
    first.error, second.error = "bad [/INST] token", "[ssl: x] no handshake"
    console = Console(record=True, width=120)
    report.print_report(finished, console)
    text = console.export_text()
    assert all(words in text for words in ("mine[/x] at http", "[/queue]", first.error, second.error))


def test_a_client_that_is_the_bottleneck_says_so() -> None:
    assert ClientHealth(0.001, 0.002, 0.3).warning is None
    assert "bottleneck" in str(ClientHealth(0.02, 0.0, 1.0).warning)
    assert "held up" in str(ClientHealth(0.0, 0.02, 1.0).warning)

    async def main() -> Finished:
        server = OpenAiServer()
        async with server.serving():
            options = dataclasses.replace(OPTIONS, base_url=server.url, request_rate=50.0, num_prompts=30)
            # What the progress display does in the loop is the client's own work.
            return await run_bench(options, lambda text: None, lambda planned: None, lambda record: time.sleep(0.05))

    assert asyncio.run(main()).client.warning is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dataset_name": "azure"}, "dataset_path"),
        ({"dataset_path": Path("x")}, "dataset_path"),
        ({"time_scale": 1.0}, "time_scale"),
        ({"length_scale": 2.0}, "length_scale"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"burstiness": -1.0}, "burstiness"),
        ({"dataset_name": "azure", "dataset_path": Path("x"), "time_scale": math.inf}, "time_scale"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"endpoint": "v1"}, "endpoint"),
        ({"temperature": 2.5}, "temperature"),
        ({"sharegpt_output_len": -5}, "sharegpt_output_len"),
        ({"sharegpt_output_len": 10**20}, "sharegpt_output_len"),
        ({"dataset_name": "azure", "dataset_path": Path("x"), "time_scale": 1.0, "request_rate": 3.0}, "request_rate"),
    ],
)
def test_flags_that_do_not_go_together(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        dataclasses.replace(OPTIONS, **fields)
    assert error.value.param == param


@pytest.mark.parametrize("name", ["random_input_len", "random_prefix_len", "random_output_len"])
def test_lengths_that_fit_into_no_memory(name: str) -> None:
    too_long: dict[str, Any] = {name: 10**20}
    with pytest.raises(InvalidRequestError, match="at most 100000000 tokens"):
        _ = dataclasses.replace(OPTIONS, **too_long).lengths


def test_the_same_seed_is_the_same_load() -> None:
    first, second, third = OpenAiServer(), OpenAiServer(), OpenAiServer()
    runs = [bench(server, request_rate=200.0, seed=seed) for server, seed in ((first, 3), (second, 3), (third, 4))]
    prompts = [[body["prompt"] for body in server.bodies] for server in (first, second, third)]
    assert prompts[0] == prompts[1] != prompts[2]
    planned = [np.array([record.at_planned for record in run.records]) for run in runs]
    assert (planned[0] == planned[1]).all()
    assert not (planned[0] == planned[2]).all()

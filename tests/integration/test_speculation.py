"""Guessed tokens over HTTP, in the default format: with and without them every answer is the same, bit for bit.

Prompts lead to copies, so that many guesses are right; sampled answers make many wrong. What counts as the same is the whole
answer but for its id and time: text, token ids, logprobs, finish reason, calls of tools, and the usage.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from loadtest.copying.tasks import copying_prompts, packaged

pytestmark = pytest.mark.slow

CONFIG = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5})
PROMPTS = copying_prompts(9, packaged("prose"), np.random.default_rng(5))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "note", "parameters": PERSON}}]
Request = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def guessing(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """1 prefill + 2 decode workers in the default format. On slow processors all requests at once take more than a minute."""
    config = tmp_path_factory.mktemp("guessing") / "tandem.yaml"
    config.write_text("limits: {queue_s: 300}\n")
    served = serve("--speculative-config", CONFIG, "--decode", "2", "--config", str(config))
    served.wait_ready()
    return served


def complete(prompt: str, **fields: Any) -> Request:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 80, "seed": 3, "return_token_ids": True, **fields}
    return "/v1/completions", body


def chat(text: str, **fields: Any) -> Request:
    messages = [{"role": "user", "content": text}]
    body = {"model": "smollm2", "messages": messages, "max_tokens": 120, "seed": 3, "return_token_ids": True, **fields}
    return "/v1/chat/completions", body


def requests_of_every_kind() -> list[Request]:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    found = [complete(prompt, temperature=0, ignore_eos=True) for prompt in PROMPTS]
    found += [complete(prompt, temperature=0.7, seed=number) for number, prompt in enumerate(PROMPTS[:3])]
    found += [complete(PROMPTS[0], temperature=0.3, n=3, logprobs=2)]
    found += [complete(PROMPTS[2], temperature=0, logprobs=5, min_tokens=20)]
    found += [complete(PROMPTS[3], temperature=0, repetition_penalty=1.05, presence_penalty=0.2, frequency_penalty=0.1)]
    found += [complete(PROMPTS[5], temperature=0.4, top_k=20, top_p=0.9, min_p=0.01, logit_bias={"30": 2})]
    found += [complete(prompt, temperature=0, stop=[" I ", "\n\n"]) for prompt in PROMPTS[:4]]
    found += [complete(PROMPTS[0], temperature=0, echo=True, logprobs=1, max_tokens=30)]
    about = 'Say it as JSON: {"name": "Ada Lovelace", "age": 36}. Once more: {"name": "Ada Lovelace", "age": 36}.'
    found += [chat(about, temperature=0, response_format=schema), chat(about, temperature=1, response_format=schema)]
    found += [chat(about, temperature=0.5, tools=TOOLS, tool_choice="required", logprobs=True, top_logprobs=2)]
    found += [chat(about, temperature=0, response_format={"type": "json_object"}, n=2)]
    return found


def long_answers() -> list[Request]:
    """In a pool of 2048 tokens all their prompts have room at once, and the answers of five not, however fast they are."""
    drawn: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.7, "logprobs": 2})
    lasting = {"max_tokens": 400, "ignore_eos": True}
    return [complete(prompt[:300], **how, **lasting) for prompt in PROMPTS[:4] for how in drawn]


def plain(request: Request) -> Request:
    path, body = request
    return path, body | {"speculative_decoding": False}


def ask(url: str, request: Request) -> dict[str, Any]:
    path, body = request
    answer = httpx.post(url + path, json=body | {"cache_salt": os.urandom(8).hex()}, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    for call in [call for choice in found["choices"] for call in choice.get("message", {}).get("tool_calls", ())]:
        del call["id"]
    return {name: value for name, value in found.items() if name not in ("id", "created")}


def all_at_once(url: str, requests: list[Request]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda request: ask(url, request), requests))


def counted(served: Any, name: str) -> float:
    lines = served.ask("GET", "/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


@pytest.fixture
def cramped(serve: Callable[..., Any], tmp_path: Path) -> Any:
    """One decode worker with room for two of the longest requests."""
    config = tmp_path / "tandem.yaml"
    config.write_text("limits: {queue_s: 300}\ndecode: {kv_cache_tokens: 2048}\n")
    served = serve("--speculative-config", CONFIG, "--max-model-len", "1024", "--config", str(config))
    served.wait_ready()
    return served


@pytest.fixture(scope="module")
def expected(guessing: Any) -> list[dict[str, Any]]:
    """What is said without guesses. That none are made is looked at, too."""
    found = all_at_once(guessing.url, [plain(request) for request in requests_of_every_kind()])
    assert counted(guessing, "tandem:spec_decode_num_draft_tokens_total") == 0
    return found


@pytest.mark.timeout(400)
def test_every_answer_is_the_same(guessing: Any, expected: list[dict[str, Any]]) -> None:
    requests = requests_of_every_kind()
    for answers in ([ask(guessing.url, request) for request in requests], all_at_once(guessing.url, requests)):
        for request, answer, alone in zip(requests, answers, expected, strict=True):
            assert answer == alone, request
    guessing.until(lambda: counted(guessing, "tandem:spec_decode_num_accepted_tokens_total") > 300, 20)
    guessing.until(guessing.clean, 20)  # what is reported then counts all of it
    drafts = counted(guessing, "tandem:spec_decode_num_draft_tokens_total")
    assert drafts >= counted(guessing, "tandem:spec_decode_num_accepted_tokens_total")
    rows = [worker for worker in guessing.workers() if worker["role"] == "decode"]
    assert sum(worker["draft_tokens"] for worker in rows) == drafts
    told = guessing.command("status").stdout
    assert "guessed tokens were right" in told


def test_streams_say_the_same_in_fewer_events(guessing: Any, expected: list[dict[str, Any]]) -> None:
    path, body = requests_of_every_kind()[0]
    wanted = {"stream": True, "include_predictions": True, "stream_options": {"include_usage": True}}
    token_ids: list[int] = []
    usage: dict[str, Any] = {}
    text, events = "", 0
    with httpx.stream("POST", guessing.url + path, json=body | wanted, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    token_ids += choice["token_ids"]
                    text += choice["text"]
                    events += 1
    [choice] = expected[0]["choices"]
    assert (text, token_ids) == (choice["text"], choice["token_ids"])
    assert events < len(token_ids)
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20
    assert details["rejected_prediction_tokens"] >= 0
    assert usage["completion_tokens"] == len(token_ids)


def test_usage_tells_who_asks(guessing: Any) -> None:
    path, body = complete(PROMPTS[0], temperature=0, ignore_eos=True)
    asked = ask(guessing.url, (path, body | {"include_predictions": True}))["usage"]["completion_tokens_details"]
    assert asked["accepted_prediction_tokens"] > 20
    without = ask(guessing.url, plain((path, body | {"include_predictions": True})))["usage"]["completion_tokens_details"]
    assert without == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert "completion_tokens_details" not in ask(guessing.url, (path, body))["usage"]
    response = {"model": "smollm2", "input": f"Repeat: {PROMPTS[0]}", "temperature": 0, "include_predictions": True}
    for fields in ({}, {"speculative_decoding": False}):
        answer = httpx.post(f"{guessing.url}/v1/responses", json=response | {"max_output_tokens": 80} | fields, timeout=120)
        assert answer.status_code == 200, answer.text
        told = answer.json()["usage"]["output_tokens_details"]
        assert (told["accepted_prediction_tokens"] > 0) == (not fields)


def decodes(served: Any) -> list[dict[str, Any]]:
    return [worker for worker in served.workers() if worker["role"] == "decode"]


Busy = Callable[[Collection[str]], list[dict[str, Any]]]


def first_busy(served: Any, busy: Busy, worker_ids: Collection[str]) -> dict[str, Any]:
    """Wait until one of them has several streams."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = busy(worker_ids)
        return bool(found)

    served.until(look, 60)
    return found[0]


@contextmanager
def under_load(served: Any, expected: list[dict[str, Any]]) -> Iterator[Busy]:
    """All requests at once, again and again: tells which of some workers have several streams. All is said as expected."""
    requests = requests_of_every_kind()
    with ThreadPoolExecutor(len(requests)) as threads:
        answers: list[Future[dict[str, Any]]] = []

        def busy(worker_ids: Collection[str]) -> list[dict[str, Any]]:
            """All requests are sent again when all are answered."""
            if all(answer.done() for answer in answers):
                answers.extend(threads.submit(ask, served.url, request) for request in requests)
            return [each for each in decodes(served) if each["worker_id"] in worker_ids and (each["running"] or 0) > 3]

        yield busy
        found = [answer.result(300) for answer in answers]
    for number, answer in enumerate(found):
        request, alone = requests[number % len(requests)], expected[number % len(requests)]
        assert answer["choices"] == alone["choices"], request


@pytest.mark.timeout(400)
def test_kills_and_drains_change_nothing(guessing: Any, expected: list[dict[str, Any]]) -> None:
    """While a decode worker is killed, and the other one is drained."""
    resumed = counted(guessing, "tandem:resumed_streams_total")
    with under_load(guessing, expected) as busy:
        names = {worker["worker_id"] for worker in decodes(guessing)}
        victim = first_busy(guessing, busy, names)
        os.kill(victim["pid"], signal.SIGKILL)
        guessing.until(lambda: counted(guessing, "tandem:resumed_streams_total") > resumed, 60)
        guessing.until(lambda: guessing.settled(1, 2), 120)
        [other] = names - {victim["worker_id"]}
        first_busy(guessing, busy, {other})
        drained = guessing.ask("POST", "/admin/drain", json={"worker": other, "restart": True})
        assert drained.status_code == 200, drained.text
    guessing.until(lambda: guessing.settled(1, 2), 120)


@pytest.mark.timeout(400)
def test_flips_change_nothing(guessing: Any, expected: list[dict[str, Any]]) -> None:
    """While a decode worker becomes a prefill worker, and comes back."""
    moved = counted(guessing, "tandem:migrations_total")
    with under_load(guessing, expected) as busy:
        names = {worker["worker_id"] for worker in decodes(guessing)}
        flipped = first_busy(guessing, busy, names)
        told = guessing.ask("POST", "/admin/flip", json={"worker_id": flipped["worker_id"], "role": "prefill"})
        assert told.status_code == 200, told.text  # a command takes longer to start than such streams last
        guessing.until(lambda: counted(guessing, "tandem:migrations_total") > moved, 60)
        first_busy(guessing, busy, names - {flipped["worker_id"]})
        assert guessing.command("scale", "prefill=1", "decode=2").returncode == 0
    guessing.until(lambda: guessing.settled(1, 2), 120)


@pytest.mark.long
def test_a_gang_says_the_same(serve: Callable[..., Any]) -> None:
    """The model has three KV heads. The bits of a gang are its own, so it is compared with itself, and computes no prompts."""
    gang = ("--decode-tensor-parallel-size", "3", "--disaggregation", "always")
    served = serve("--speculative-config", CONFIG, *gang)
    served.wait_ready()
    requests = requests_of_every_kind()
    alone = all_at_once(served.url, [plain(request) for request in requests])
    assert counted(served, "tandem:spec_decode_num_draft_tokens_total") == 0
    for request, answer, wanted in zip(requests, all_at_once(served.url, requests), alone, strict=True):
        assert answer == wanted, request
    served.until(lambda: counted(served, "tandem:spec_decode_num_accepted_tokens_total") > 100, 20)
    served.end()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "should be JSON"),
        ('{"method": "eagle", "num_speculative_tokens": 4}', "eagle is not built; methods are ngram"),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 1}', "draft_tensor_parallel_size"),
    ],
)
def test_what_is_refused_at_the_start(launch: Callable[..., Any], config: str, told: str) -> None:
    served = launch("--speculative-config", config)
    served.process.wait(60)
    assert served.process.returncode == 2
    assert told in served.said()
    assert "Traceback" not in served.said()


@pytest.mark.timeout(400)
def test_preemptions_change_nothing(guessing: Any, cramped: Any, expected: list[dict[str, Any]]) -> None:
    """In a pool in which not all streams have room to their ends."""
    roomy = all_at_once(guessing.url, [plain(request) for request in long_answers()])
    for requests, wanted in ((requests_of_every_kind(), expected), (long_answers(), roomy)):
        for request, answer, alone in zip(requests, all_at_once(cramped.url, requests), wanted, strict=True):
            assert answer == alone, request
    for number, request in enumerate(requests_of_every_kind()[: len(PROMPTS)]):  # alone: with many rows, guesses need not pay
        assert ask(cramped.url, request) == expected[number], request
    cramped.until(cramped.clean, 20)
    assert counted(cramped, "tandem:num_preemptions_total") > 0
    assert counted(cramped, "tandem:spec_decode_num_accepted_tokens_total") > 100
    assert cramped.leaks() == []

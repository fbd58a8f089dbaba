"""Streams that are resumed: by whom, from where, with what; and that ordinary ones know nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from cluster.commands.lib.key_file import add_key
from configs.schema import TierConfig
from protocol.errors import KvTransferError, StreamTakenError
from router.access.callers import anonymous
from router.access.meter import Meter
from router.api.errors import error_response
from router.endpoints.metered import MeteredRouter
from router.endpoints.reading import has_left
from router.endpoints.resumption import ResumptionEndpoint
from router.request.answer import Delta
from router.resume.resumable import AnswerRequest

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": "Count:", "max_tokens": 40, "stream": True} | fields


class Client:
    """One client's stream under one id."""

    def __init__(self, cluster: Any, path: str = "/v1/completions", **fields: Any) -> None:
        self._cluster = cluster
        self._path = path
        self._body = {"model": "smollm2", "stream": True, "max_tokens": 40} | fields
        self.headers = {"x-request-id": uuid.uuid4().hex, "x-tandem-resumable": "true"}
        self.events: list[str] = []

    async def read(self, num_events: int | None = None, headers: dict[str, str] | None = None) -> None:
        """So many events more, or all."""
        sent = self.headers | (headers or {})
        async with self._cluster.http.stream("POST", self._path, json=self._body, headers=sent) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines, event = answer.aiter_lines(), ""
            async with contextlib.aclosing(lines):
                async for line in lines:
                    event += f"{line}\n" if line else ""
                    if event and not line:
                        self.events.append(event)
                        event = ""
                        if num_events is not None and len(self.events) >= num_events:
                            return

    async def again(self, num_events: int | None = None) -> None:
        """Reconnect behind the last event."""
        await self.read(num_events, {"last-event-id": self.events[-1].split("\n")[0].removeprefix("id: ")})

    @property
    def data(self) -> list[Any]:
        """Of the events."""
        lines = [event.split("\n")[1].removeprefix("data: ") for event in self.events]
        chunks: list[Any] = [json.loads(line) if line != "[DONE]" else line for line in lines]
        assert len({chunk["id"] for chunk in chunks if chunk != "[DONE]"}) == 1, "one answer"
        return chunks


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", {"prompt": "Count:", "seed": 1}),
    "choices": ("/v1/completions", {"prompt": ["Count:", "Say:"], "n": 2, "return_token_ids": True}),
    "stop": ("/v1/completions", {"prompt": "Count:", "stop": ["eight n"]}),
    "scores": ("/v1/completions", {"prompt": "Count:", "logprobs": 2, "echo": True, "n": 2}),
    "usage": (
        "/v1/completions",
        {"prompt": "Count:", "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Count"}], "logprobs": True}),
}


@pytest.mark.timeout(60)
def test_choices_without_tokens_that_have_ended_hold_up_no_others(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        client = Client(cluster, prompt="Count:", n=2, echo=True, max_tokens=0, logprobs=1)
        await client.read(1)
        await client.again()
        chunks = [chunk for chunk in client.data if chunk != "[DONE]"]
        assert sorted(choice["index"] for chunk in chunks for choice in chunk["choices"]) == [0, 1]
        assert all(choice["text"] == "Count:" for chunk in chunks for choice in chunk["choices"])
        assert all(len(choice["logprobs"]["tokens"]) >= 2 for chunk in chunks for choice in chunk["choices"])
        await cluster.clean()

    run_cluster(test)


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_that_is_cut_anywhere_is_the_whole_stream(run_cluster: Run, kind: str) -> None:
    """After every event the client leaves, and comes back; every event comes once, as in a stream that nobody cut."""
    path, fields = BODIES[kind]

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.002
        whole = Client(cluster, path, **fields)
        await whole.read()
        cut = Client(cluster, path, **fields)
        cluster.prefill[0].seen.clear()
        await cut.read(1)
        while not cut.events[-1].endswith("[DONE]\n"):
            await cut.again(len(cut.events) + 1)
        ids = [event.split("\n")[0] for event in cut.events]
        assert len(set(ids)) == len(ids)
        assert texts(cut.data) == texts(whole.data)
        sampled = cluster.prefill[0].seen
        assert len(sampled) > 4
        assert len({message.sampling.seed for message in sampled}) == len({message.token_ids[:1] for message in sampled})
        replayed = Client(cluster, path, **fields)
        replayed.headers = cut.headers
        await replayed.read(headers={"last-event-id": "0.0"})
        assert replayed.events == cut.events, "byte by byte"
        await cut.again()
        assert cut.events[-1].endswith("[DONE]\n"), "nothing comes after the end"
        await cluster.clean()

    run_cluster(test)


async def under_way(cluster: Any, *, step_s: float) -> tuple[Client, asyncio.Future[None]]:
    """A stream that has sent three events, and the task that reads on."""
    cluster.says(TEXT)
    cluster.script.step_s = step_s
    client = Client(cluster, prompt="Count:")
    reading = asyncio.ensure_future(client.read())
    await cluster.until(lambda: len(client.events) >= 3)
    return client, reading


def texts(data: list[Any]) -> dict[int, tuple[str, list[int], Any, list[Any]]]:
    """Text, tokens, finish reason and logprobs of each choice."""
    found: dict[int, tuple[str, list[int], Any, list[Any]]] = {}
    for chunk in data:
        for choice in [] if chunk == "[DONE]" else chunk["choices"]:
            text, token_ids, _, scores = found.get(choice["index"], ("", [], None, []))
            more = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            logprobs = choice.get("logprobs") or {}
            scores = scores + (logprobs.get("token_logprobs") or logprobs.get("content") or [])
            found[choice["index"]] = (text + more, token_ids + choice.get("token_ids", []), choice["finish_reason"], scores)
    return found


def test_calls_of_tools_keep_their_ids(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says('<tool_call>\n{"name": "f", "arguments": {"a": "some long text here"}}\n</tool_call>')
        cluster.script.step_s = 0.002
        messages = [{"role": "user", "content": "Call"}]
        client = Client(cluster, "/v1/chat/completions", messages=messages, tools=[TOOL], tool_choice="required")
        await client.read(3)
        await client.again(5)
        await client.again()
        deltas = [chunk["choices"][0]["delta"] for chunk in client.data if chunk != "[DONE]"]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["index"] for call in calls if "id" in call] == [0]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a": "some long text here"}'

    run_cluster(test)


def test_the_one_who_comes_back_has_the_stream(run_cluster: Run) -> None:
    """The first connection is still open: it ends when the second one has taken over, and what it holds is freed."""

    async def test(cluster: Any) -> None:
        first, reading = await under_way(cluster, step_s=0.1)
        second = Client(cluster, prompt="Count:")
        second.headers = first.headers
        second.events = first.events[:2]
        await second.again()
        await reading
        assert "another connection" in first.events[-1]
        assert '"stream_taken"' in first.events[-1], "who comes back then would take it in turn"
        assert error_response(StreamTakenError("taken")).headers["x-should-retry"] == "false", "OpenAI's clients repeat a 409"
        assert texts(second.data)[0][0] == TEXT
        assert second.events[: len(first.events) - 1] == first.events[:-1], "the same events"
        await cluster.clean()

    run_cluster(test)


def test_who_has_left_takes_no_stream(run_cluster: Run) -> None:
    """Its router was held for longer than it waited. Meanwhile it may have the stream from another router."""

    async def test(cluster: Any) -> None:
        client, reading = await under_way(cluster, step_s=0.05)
        read, held, goes_on = cluster.records.read, asyncio.Event(), asyncio.Event()

        async def read_late(*args: Any) -> Any:
            held.set()
            await goes_on.wait()
            return await read(*args)

        cluster.records.read = read_late
        leaving = asyncio.ensure_future(
            cluster.http.post("/v1/completions", json=asked(), headers=client.headers | {"last-event-id": "1.1"})
        )
        await held.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0.05)
        goes_on.set()
        await reading
        assert texts(client.data)[0][0] == TEXT
        assert client.events[-1].endswith("[DONE]\n")
        await cluster.clean()

    run_cluster(test)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_body_that_has_come_does_not_hide_that_its_client_has_left(leaves: bool) -> None:
    """Ray Serve hands messages on in their order: the request again, and then that its client has gone."""
    body = [{"type": "http.request", "body": b"{}", "more_body": more} for more in (True, False)]
    messages = [*body, *([{"type": "http.disconnect"}] if leaves else [])]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    request = Request({"type": "http", "headers": []}, receive)
    assert asyncio.run(asyncio.wait_for(has_left(request), 5)) is leaves
    assert not messages


def test_who_is_refused_leaves_the_stream_where_it_is(run_cluster: Run, tmp_path: Path) -> None:
    """By a limit of running answers, or by the minute's: with the time to come back, before anything is sent."""
    keys_file = tmp_path / "keys.json"
    key = add_key(keys_file, {"tenant": "a", "tokens_per_minute": 100, "max_running_requests": 3})

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.05
        client = Client(cluster, prompt="Count:", n=2)
        client.headers |= bearer(key)
        reading = asyncio.ensure_future(client.read())
        await cluster.until(lambda: len(client.events) >= 3)
        headers = client.headers | {"last-event-id": "1.1"}
        refused = await cluster.http.post("/v1/completions", json=asked(), headers=headers)
        assert (refused.status_code, "3 requests running" in refused.text) == (429, True)
        await reading
        assert client.events[-1].endswith("[DONE]\n"), "the first connection has its stream"
        refused = await cluster.http.post("/v1/completions", json=asked(), headers=headers)
        while refused.status_code == 200:  # what was not used came back
            refused = await cluster.http.post("/v1/completions", json=asked(max_tokens=40), headers=bearer(key))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) > 0

    run_cluster(test, http={"keys_file": str(keys_file)})


def test_who_leaves_while_it_is_repeated_pays_nothing(run_cluster: Run) -> None:
    """Nothing is computed before all that is on record was sent: a client may come and go as often as it likes."""

    async def recorded() -> AsyncGenerator[Delta, None]:
        for _ in range(2):
            yield Delta(0, "a", (5,), (), None, 0)

    async def test(cluster: Any) -> None:
        meter = Meter(None)
        endpoint = ResumptionEndpoint(cluster.router, MeteredRouter(cluster.router, meter, None), cluster.recorder)
        caller = anonymous({"standard": TierConfig(tokens_per_minute=60)})
        for _ in range(3):
            pieces = endpoint._charged(await meter.charge_answer(caller, 50, 0), recorded())
            await anext(pieces)
            await pieces.aclose()
        await meter.close()

    run_cluster(test)


def test_the_body_of_a_resumed_stream_counts_for_nothing(run_cluster: Run) -> None:
    """Clients send the request again. Nobody reads it, also where all of them together are over a bound."""

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.05
        clients = [Client(cluster, prompt="Count:", user="u" * 90_000) for _ in range(3)]
        for client in clients:
            await client.read(2)
        await asyncio.gather(*(client.again() for client in clients))
        assert all(texts(client.data)[0][0] == TEXT for client in clients)
        assert (await cluster.complete()).status_code == 200

    run_cluster(test, http={"max_body_bytes_in_flight": 200_000})


def test_a_request_is_read_once_when_its_stream_is_resumed(run_cluster: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    load = AnswerRequest.load

    def noted(data: bytes) -> AnswerRequest:
        read.append(data)
        return load(data)

    monkeypatch.setattr(AnswerRequest, "load", noted)

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        client = Client(cluster, prompt="Count:")
        await client.read(3)
        assert not read
        await client.read(headers={"last-event-id": "1.1"})
        assert len(read) == 1

    run_cluster(test)


def test_one_cancelled_write_ends_no_other_stream(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        write = cluster.records.write
        failed: list[Any] = []

        async def once(entries: Any) -> Any:
            if not failed:
                failed.append(entries)
                raise asyncio.CancelledError
            return await write(entries)

        cluster.records.write = once
        for _ in range(2):
            client = Client(cluster, prompt="Count:")
            await client.read()
            assert texts(client.data)[0][0] == TEXT
        assert failed

    run_cluster(test)


def test_a_stream_can_be_resumed_after_its_workers_failed(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        client = Client(cluster, prompt="Count:")
        cluster.decode[0].error_after = 2
        prefill = cluster.prefill[0]
        prefill.gate.clear()
        reading = asyncio.ensure_future(client.read())
        await cluster.until(lambda: bool(prefill.seen))
        prefill.fail_with = KvTransferError("broken")  # from the second prompt on, which resumes the stream
        prefill.gate.set()
        await reading
        assert "error" in client.events.pop()
        assert client.events, "the stream had begun"
        cluster.decode[0].error_after = prefill.fail_with = None
        await client.again()
        assert texts(client.data)[0][0] == TEXT

    run_cluster(test)


def test_who_finds_no_stream_is_told_so(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        client = Client(cluster, prompt="Count:")
        await client.read(2)
        refused = [
            {"x-request-id": "unknown"},
            {"last-event-id": "999.1"},  # more than anybody said
        ]
        for change in refused:
            headers = client.headers | {"last-event-id": "1.1"} | change
            answer = await cluster.http.post("/v1/completions", json=asked(), headers=headers)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "stream_not_found"
            assert answer.json()["error"]["param"] == "x-request-id"
        headers = client.headers | {"last-event-id": "1.1"}
        answer = await cluster.http.post("/v1/chat/completions", json=asked(), headers=headers)
        assert answer.status_code == 404, "of another endpoint"
        cluster.records.away = True
        answer = await cluster.http.post("/v1/completions", json=asked(), headers=headers)
        assert answer.status_code == 503
        cluster.records.away = False
        await client.again()
        assert client.events[-1].endswith("[DONE]\n"), "no refusal has changed the stream"

    run_cluster(test)


def test_streams_are_forgotten(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        client = Client(cluster, prompt="Count:")
        await client.read()
        await asyncio.sleep(0.25)  # what passes is the retention time
        headers = client.headers | {"last-event-id": "1.1"}
        answer = await cluster.http.post("/v1/completions", json=asked(), headers=headers)
        assert answer.status_code == 404

    run_cluster(test, resumable={"retention_s": 0.2})


def test_streams_go_on_without_their_keeper(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        client, reading = await under_way(cluster, step_s=0.05)
        cluster.records.away = True
        await reading
        assert texts(client.data)[0][0] == TEXT
        cluster.records.away = False
        last = client.events[-1].split("\n")[0].removeprefix("id: ")
        answer = await cluster.http.post("/v1/completions", json=asked(), headers=client.headers | {"last-event-id": last})
        assert answer.status_code == 404, "the client has seen what nobody recorded"

    run_cluster(test)


def test_streams_share_the_calls_to_their_keeper(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        """Whatever comes while a call is under way is written by the next one."""
        cluster.says(TEXT)
        cluster.records.call_s = 0.03
        clients = [Client(cluster, prompt="Count:") for _ in range(8)]
        await asyncio.gather(*(client.read() for client in clients))
        num_pieces = sum(len(client.events) for client in clients)
        assert 0 < cluster.records.num_calls < num_pieces / 2

    run_cluster(test)


def test_others_are_not_recorded_and_have_no_ids(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        client = Client(cluster, prompt="Count:")
        await client.read(headers={"x-tandem-resumable": "false"})
        assert all(event.startswith("data: ") for event in client.events)
        assert cluster.records.num_calls == 0

    run_cluster(test)


def test_what_can_not_be_resumed_is_refused(run_cluster: Run) -> None:
    wish = {"x-tandem-resumable": "true", "x-request-id": uuid.uuid4().hex}
    responses = {"model": "smollm2", "input": "Count", "stream": True}
    cases: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
        ("/v1/completions", asked(stream=False), wish, "stream"),
        ("/v1/completions", asked(), wish | {"x-tandem-resumable": "yes"}, "x-tandem-resumable"),
        ("/v1/completions", asked(), {"x-tandem-resumable": "true"}, "x-request-id"),
        ("/v1/completions", asked(), wish | {"x-request-id": "a b"}, "x-request-id"),
        ("/v1/completions", asked(), wish | {"x-request-id": "story-1"}, "x-request-id"),
        ("/v1/completions", asked(), wish | {"x-request-id": "1" * 64}, "x-request-id"),
        ("/v1/completions", asked(), wish | {"last-event-id": "17"}, "last-event-id"),
        ("/v1/completions", asked(), {"last-event-id": "1.1"}, "x-request-id"),
        ("/v1/responses", responses, wish, "x-tandem-resumable"),
        ("/v1/responses", responses, {"last-event-id": "1.1"}, "last-event-id"),
    ]

    async def test(cluster: Any) -> None:
        for path, body, headers, param in cases:
            answer = await cluster.http.post(path, json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text

    run_cluster(test)


def test_only_the_tenant_resumes_at_its_own_cost(run_cluster: Run, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.json"
    limits = {"requests_per_minute": 2, "tokens_per_minute": 60}  # a prompt of 2 and 40 tokens fit once
    mine, mine_too, theirs = (add_key(keys_file, {"tenant": tenant} | limits) for tenant in ("acme", "acme", "zenith"))

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.1
        client = Client(cluster, prompt="Count:")
        client.headers |= bearer(mine)
        await client.read(3)
        headers = client.headers | bearer(theirs) | {"last-event-id": "1.1"}
        answer = await cluster.http.post("/v1/completions", json=asked(), headers=headers)
        assert answer.status_code == 404
        await client.again(5)
        answer = await cluster.http.post("/v1/completions", json=asked(), headers=client.headers | {"last-event-id": "1.1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        client.headers |= bearer(mine_too)
        await client.again()
        assert texts(client.data)[0][0] == TEXT

    run_cluster(test, http={"keys_file": str(keys_file)})


def test_a_key_may_call_its_streams_as_it_likes(run_cluster: Run, tmp_path: Path) -> None:
    """Nobody else finds them, whatever they are called."""
    keys_file = tmp_path / "keys.json"
    mine, theirs = (add_key(keys_file, {"tenant": tenant}) for tenant in ("acme", "zenith"))

    async def test(cluster: Any) -> None:
        clients = [Client(cluster, prompt="Count:") for _ in range(2)]
        for client, key in zip(clients, (mine, theirs), strict=True):
            client.headers |= bearer(key) | {"x-request-id": "story-1"}
            await client.read(2)
        for client in clients:
            await client.again()
            assert client.events[-1].endswith("[DONE]\n")

    run_cluster(test, http={"keys_file": str(keys_file)})


def test_streams_that_are_collected_and_resumed_at_once_go_ahead_of_nobody(run_cluster: Run, tmp_path: Path) -> None:
    """Reconnections wait in line with their tenant's other requests, so another tenant's request goes between them."""
    keys_file = tmp_path / "keys.json"
    collector, other = (add_key(keys_file, {"tenant": tenant}) for tenant in ("collector", "other"))

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.005
        line, decode = cluster.router._admission._line, cluster.decode[0]
        clients = [Client(cluster, prompt=f"Count {number}:") for number in range(6)]
        for client in clients:
            client.headers |= bearer(collector)
            await client.read(3)
        await cluster.clean()
        decode.reserved.clear()
        decode.reserve_gate.clear()
        cluster.http.headers.update(bearer(other))
        tasks = []
        for number, client in enumerate(clients):
            tasks.append(asyncio.ensure_future(client.again()))
            await cluster.until(lambda number=number: len(line) == len(tasks))
            if number == 2:
                tasks.append(asyncio.ensure_future(cluster.complete(prompt="Other")))
                await cluster.until(lambda: len(line) == len(tasks))
        decode.reserve_gate.set()
        await asyncio.gather(*tasks)
        salts = [message.cache_salt for message in decode.reserved]
        assert salts.count("collector/") == 6
        assert salts.index("other/") == 1, "after what was at the front already"
        assert all(texts(client.data)[0][0] == TEXT for client in clients)

    run_cluster(test, http={"keys_file": str(keys_file)})

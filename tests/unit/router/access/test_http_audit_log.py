"""The audit log over HTTP: who was refused, what operators did, and no secret of anybody."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig
from router.access import audit_trail
from router.access.audit_trail import MAX_QUEUED, REFUSALS_AT_ONCE, AuditQueue, AuditTrail, note_action
from router.app import create_app
from telemetry.audit_file import Line, audit_line

Run = Callable[..., None]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_trail, "_PAUSE_S", 0.01)


class Written:
    """An AuditStore in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.away = False

    async def append(self, lines: Sequence[Line]) -> None:
        if self.away:
            raise ConnectionError("the keeper is gone")
        self.lines += [json.loads(json.dumps(line)) for line in lines]

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines]


def audited(cluster: Any, store: Written) -> tuple[httpx.AsyncClient, AuditQueue]:
    """A client of the cluster's router whose app keeps an audit log, and its queue."""
    queue = AuditQueue(store)
    queue.start()
    app = create_app(cluster.router, cluster.meter, cluster.recorder, queue)
    transport = httpx.ASGITransport(app, client=("192.0.2.7", 4711))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1"), queue


def test_refusals_name_the_key_if_there_is_one_and_never_a_secret(run_cluster: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    known = add_key(path, {"tenant": "acme"})
    other = add_key(path, {"tenant": "zoo", "models": ("another",)})
    _, key_id, secret = known.split("-", 2)
    sent = ["sk-proj-VerySecretOfSomebodyElse", f"tk-{key_id}-{secret}WRONG", "tk-unknown-secret1", "VerySecret"]

    async def test(cluster: Any) -> None:
        store = Written()
        client, queue = audited(cluster, store)
        async with client:
            for given in sent:
                headers = {"authorization": f"Bearer {given}"}
                assert (await client.get("/v1/models?api_key=VerySecret", headers=headers)).status_code == 401
            assert (await client.get("/v1/models")).status_code == 401
            body = {"model": "smollm2", "prompt": "x"}
            headers = {"authorization": f"Bearer {other}"}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 403
            assert (await client.get("/v1/models", headers={"authorization": f"Bearer {known}"})).status_code == 200
        await queue.close()
        assert store.events() == ["refused"] * 6, "what was answered is not there"
        named = [(line["who"], line.get("key"), line.get("tenant"), line["status"]) for line in store.lines]
        assert named[:5] == [("unknown", key, None, 401) for key in (None, key_id, None, None, None)]
        assert named[5] == ("key", other.split("-")[1], "zoo", 403)
        assert {line["address"] for line in store.lines} == {"192.0.2.7"}
        assert {line["path"] for line in store.lines} == {"/v1/models", "/v1/completions"}
        assert all(line["request"] and line["method"] for line in store.lines)
        for word in ("Secret", "secret1", secret, secret[:8], other.split("-", 2)[2], "WRONG"):
            assert word not in json.dumps(store.lines)

    run_cluster(test, http=HttpConfig(keys_file=str(path)).model_dump())


def test_what_operators_do_is_noted_also_where_it_fails(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        store = Written()
        client, queue = audited(cluster, store)
        key = {"authorization": "Bearer sesame"}
        async with client:
            assert (await client.post("/admin/scale", json={"decode": 2}, headers=key)).status_code == 200
            assert (await client.post("/admin/drain", json={"worker": "decode-1"}, headers=key)).status_code == 200
            rollout = {"action": "start", "config": {"http": {"admin_key": "sesame"}, "dtype": "float32"}}
            assert (await client.post("/admin/rollout", json=rollout, headers=key)).status_code == 200
            cluster.controller.away = True
            assert (await client.post("/admin/scale", json={"decode": 3}, headers=key)).status_code == 503
            assert (await client.post("/admin/scale", json={"decode": 4})).status_code == 401
            assert (await client.get("/admin/status", headers=key)).status_code == 200
        await queue.close()
        assert store.lines[2]["keys"] == ["dtype", "http"], "their values may be secrets"
        kept = ("event", "who", "status", "decode", "worker", "restart")
        assert [tuple(line.get(name) for name in kept) for line in store.lines] == [
            ("scale", "operator", 200, 2, None, None),
            ("drain", "operator", 200, None, "decode-1", False),
            ("rollout", "operator", 200, None, None, None),
            ("scale", "operator", 503, 3, None, None),
            ("refused", "unknown", 401, None, None, None),
        ]
        assert "sesame" not in json.dumps(store.lines)

    run_cluster(test, http=HttpConfig(admin_key="sesame").model_dump())


def test_a_flood_of_refusals_is_counted_and_not_written(run_cluster: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, {"tenant": "acme"})

    async def test(cluster: Any) -> None:
        store = Written()
        client, queue = audited(cluster, store)
        async with client:
            longest = 0.0
            for _ in range(300):
                begun = time.thread_time()
                assert (await client.get("/v1/models", headers={"authorization": "Bearer tk-x-y"})).status_code == 401
                longest = max(longest, time.thread_time() - begun)
            assert (await client.post("/admin/scale", json={"decode": 2})).status_code == 403
        queue.done(audit_line("scale", decode=1))
        await queue.close()
        assert store.events().count("refused") <= REFUSALS_AT_ONCE + 2
        left_out = sum(line["count"] for line in store.lines if line["event"] == "left_out")
        assert left_out + store.events().count("refused") == 301
        assert "scale" in store.events(), "what operators do is there all the same"
        assert longest < 1.0

    run_cluster(test, http=HttpConfig(keys_file=str(path)).model_dump())


@pytest.mark.parametrize("answers", [True, False])
def test_the_end_writes_each_line_once_and_waits_for_no_owner(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    monkeypatch.setattr(audit_trail, "_CLOSE_S", 10.0 if answers else 0.05)

    async def main() -> None:
        begun, goes_on, store = asyncio.Event(), asyncio.Event(), Written()

        class Slow(Written):
            async def append(self, lines: Sequence[Line]) -> None:
                begun.set()
                await goes_on.wait()
                await store.append(lines)

        queue = AuditQueue(Slow())
        queue.start()
        queue.done(audit_line("scale", decode=1))
        await begun.wait()
        queue.done(audit_line("scale", decode=2))
        closing = asyncio.ensure_future(queue.close())
        await asyncio.sleep(0)
        if answers:
            goes_on.set()
        async with asyncio.timeout(5):
            await closing
        assert [line["decode"] for line in store.lines] == ([1, 2] if answers else [])

    asyncio.run(main())


def test_a_slow_owner_of_the_log_gets_each_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives up waiting for a call takes back nothing of it."""
    monkeypatch.setattr(audit_trail, "_APPEND_S", 0.01)

    async def main() -> None:
        store, calls = Written(), list[asyncio.Task[None]]()

        class Slow:
            async def append(self, lines: Sequence[Line]) -> None:
                calls.append(asyncio.ensure_future(self._write(lines, 0.0 if calls else 0.03)))
                await asyncio.shield(calls[-1])

            async def _write(self, lines: Sequence[Line], takes_s: float) -> None:
                await asyncio.sleep(takes_s)
                await store.append(lines)

        queue = AuditQueue(Slow())
        queue.start()
        queue.done(audit_line("scale", decode=1))
        async with asyncio.timeout(5):
            while not calls:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            queue.done(audit_line("scale", decode=2))
            while len(store.lines) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await queue.close()
        await asyncio.gather(*calls)
        assert [line["decode"] for line in store.lines] == [1, 2]

    asyncio.run(main())


def test_the_end_tries_again() -> None:
    async def main() -> None:
        class Restarting(Written):
            num_failures = 2

            async def append(self, lines: Sequence[Line]) -> None:
                self.num_failures -= 1
                self.away = self.num_failures >= 0
                await super().append(lines)

        store = Restarting()
        queue = AuditQueue(store)
        queue.start()
        queue.done(audit_line("scale", decode=1))
        await queue.close()
        assert store.events() == ["scale"]

    asyncio.run(main())


def test_lines_wait_for_the_owner_of_the_log_up_to_a_bound() -> None:
    async def main() -> None:
        store = Written()
        store.away = True
        queue = AuditQueue(store)
        queue.start()
        for number in range(MAX_QUEUED + 5):
            queue.done(audit_line("scale", decode=number))
        await asyncio.sleep(0.05)
        assert store.lines == []
        store.away = False
        async with asyncio.timeout(5):
            while len(store.lines) < MAX_QUEUED + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await queue.close()
        assert [line["decode"] for line in store.lines[:-1]] == list(range(MAX_QUEUED)), "in order, each once"
        assert (store.lines[-1]["event"], store.lines[-1]["count"]) == ("left_out", 5)

    asyncio.run(main())


@pytest.mark.parametrize(("error", "status"), [(asyncio.CancelledError(), 499), (ValueError("a defect"), 500)])
def test_what_was_ordered_is_noted_also_if_nobody_gets_an_answer(error: BaseException, status: int) -> None:
    """Serve cancels a request whose client has gone, and what it has ordered is done all the same."""

    async def ordered(scope: Any, receive: Any, send: Any) -> None:
        note_action(scope, "scale", decode=1)
        raise error

    async def unordered(scope: Any, receive: Any, send: Any) -> None:
        raise error

    async def main() -> list[dict[str, Any]]:
        store = Written()
        queue = AuditQueue(store)
        queue.start()
        for app in (ordered, unordered):
            state = {"request_id": "r"}
            scope = {"type": "http", "method": "POST", "path": "/admin/scale", "client": ("192.0.2.7", 1), "state": state}
            with pytest.raises(type(error)):
                await AuditTrail(app, queue, lambda _: None)(scope, None, None)  # type: ignore[arg-type]
        await queue.close()
        return store.lines

    [line] = asyncio.run(main())
    assert (line["event"], line["decode"], line["status"]) == ("scale", 1, status)

"""API keys over HTTP: who passes, who is told what."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.commands.lib.key_file import add_key, revoke_key
from configs.schema import HttpConfig
from router.app import create_app

Run = Callable[..., None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def http(path: Path) -> dict[str, Any]:
    return HttpConfig(keys_file=str(path)).model_dump()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_only_good_keys_pass(run_cluster: Run, path: Path) -> None:
    good = add_key(path, {"tenant": "a"})
    expired = add_key(path, {"tenant": "a", "expires": datetime.now(UTC) - timedelta(days=1)})

    async def test(cluster: Any) -> None:
        paths = [("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize")]
        paths += [("POST", "/v1/responses")]
        paths += [("POST", "/detokenize"), ("GET", "/v1/models/smollm2"), ("GET", "/v1/nothing"), ("GET", "//v1/models")]
        for method, where in paths:
            for headers in ({}, bearer("tk-x-y"), bearer(expired), {"authorization": f"Basic {good}"}, bearer("\xfc")):
                raw = {name: value.encode("latin-1") for name, value in headers.items()}
                response = await cluster.http.request(method, where, headers=raw)
                assert response.status_code == 401, (where, headers)
                assert response.headers["www-authenticate"] == "Bearer"
                assert "x-request-id" in response.headers
                error = response.json()["error"]
                assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert (await cluster.http.get("/health")).status_code == 200
        assert (await cluster.http.get("/metrics")).status_code == 200
        refused = await cluster.http.get("/admin/status")
        assert (refused.status_code, "http.admin_key" in refused.text) == (403, True), "where there are keys it wants one too"
        cluster.http.headers.update(bearer(good))
        assert (await cluster.complete()).status_code == 200
        assert (await cluster.http.get("/v1/models")).json()["data"][0]["id"] == "smollm2"
        assert (await cluster.http.get("/nothing")).status_code == 404
        revoke_key(path, good.split("-")[1])
        assert "was revoked" in (await cluster.complete()).json()["error"]["message"]

    run_cluster(test, http=http(path))


def test_the_openai_package_understands(run_cluster: Run, path: Path) -> None:
    key = add_key(path, {"tenant": "a", "models": ("another",)})

    async def test(cluster: Any) -> None:
        for given, error in (("tk-a-b", openai.AuthenticationError), (key, openai.PermissionDeniedError)):
            async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=given, max_retries=0) as client:
                with pytest.raises(error):
                    await client.completions.create(model="smollm2", prompt="a")
        assert (await cluster.http.get("/v1/models", headers=bearer(key))).json()["data"] == []

    run_cluster(test, http=http(path))


def test_the_tenant_salts_the_cache_in_front_of_the_requests_own_salt(run_cluster: Run, path: Path) -> None:
    keys = [add_key(path, {"tenant": tenant}) for tenant in ("a", "a", "b")]

    async def test(cluster: Any) -> None:
        for key in keys:
            cluster.http.headers.update(bearer(key))
            await cluster.complete(cache_salt="mine")
            await cluster.complete()
        salts = [message.cache_salt for message in cluster.prefill[0].seen]
        assert salts == ["a/mine", "a/", "a/mine", "a/", "b/mine", "b/"]

    run_cluster(test, http=http(path))


def test_a_keys_context(run_cluster: Run, path: Path) -> None:
    key = add_key(path, {"tenant": "a", "max_context": 100})

    async def test(cluster: Any) -> None:
        cluster.http.headers.update(bearer(key))
        refused = await cluster.complete(prompt=[5] * 60, max_tokens=41)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        chat = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
        answer = await cluster.http.post("/v1/chat/completions", json=chat)
        assert answer.json()["usage"]["total_tokens"] == 100, "an answer of no length given ends there"

    run_cluster(test, http=http(path))


@pytest.mark.parametrize(("allowed", "status"), [(True, 200), (False, 403)])
def test_anonymous_requests_from_elsewhere_need_the_flag(run_cluster: Run, allowed: bool, status: int) -> None:
    async def test(cluster: Any) -> None:
        transport = httpx.ASGITransport(create_app(cluster.router, cluster.meter, cluster.recorder), client=("10.0.0.7", 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.get("/v1/models")
            assert response.status_code == status
        assert (await cluster.http.get("/v1/models")).status_code == status, "HAProxy too comes from loopback"

    run_cluster(test, http=HttpConfig(host="0.0.0.0", allow_anonymous=allowed).model_dump())


def test_no_key_gets_into_the_log(run_cluster: Run, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = add_key(path, {"tenant": "a"})
    caplog.set_level("DEBUG")

    async def test(cluster: Any) -> None:
        for given in (key, key[:-1]):
            cluster.http.headers.update(bearer(given))
            await asyncio.gather(cluster.complete(), cluster.complete(prompt=""))
        os.utime(path)
        await cluster.complete()

    run_cluster(test, http=http(path))
    assert caplog.records
    assert key.split("-", 2)[2][:20] not in "".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)


def test_what_a_key_may_not_is_said_in_the_words_of_the_endpoint(run_cluster: Run, path: Path) -> None:
    key = add_key(path, {"tenant": "a", "max_context": 100, "tokens_per_minute": 60})

    async def test(cluster: Any) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"input": "word " * 200}, "input"),
            ({"input": "a", "max_output_tokens": 90}, "max_output_tokens"),
            ({"input": "a", "max_output_tokens": 50}, "max_output_tokens"),
            ({"input": "a", "max_output_tokens": 50, "stream": True}, "max_output_tokens"),
        ]
        for fields, param in cases:
            answer = await cluster.http.post("/v1/responses", json={"model": "smollm2"} | fields, headers=bearer(key))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], param in error["message"]) == (400, param, True), error
        good = await cluster.http.post(
            "/v1/responses", json={"model": "smollm2", "input": "a", "max_output_tokens": 9}, headers=bearer(key)
        )
        assert good.status_code == 200

    run_cluster(test, http=http(path))

"""What operators and tools use: models, tokenize, health, metrics, status, scale, request ids."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from configs.schema import HttpConfig
from protocol.errors import UnavailableError
from protocol.messages.workers import Duty, Role
from router.api.document.openapi import DocumentedApp
from router.app import create_app

Run = Callable[..., None]


def test_models(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        [card] = (await cluster.http.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("smollm2", "model", 8192)
        assert (await cluster.http.get("/v1/models/smollm2")).json() == card

    run_cluster(test)


def test_tokenize_and_back(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        text = "Grüße, 日本 <|im_end|> 42"
        body = (await cluster.http.post("/tokenize", json={"model": "smollm2", "prompt": text})).json()
        assert body == {"tokens": cluster.tokenizer.encode(text), "count": len(body["tokens"]), "max_model_len": 8192}
        back = await cluster.http.post("/detokenize", json={"model": "smollm2", "tokens": body["tokens"]})
        assert back.json() == {"prompt": text}
        messages = [{"role": "user", "content": "hi"}]
        chat = (await cluster.http.post("/tokenize", json={"messages": messages})).json()
        shorter = (await cluster.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
        assert chat["count"] > shorter["count"]
        long = (await cluster.http.post("/tokenize", json={"prompt": "word " * 20_000})).json()
        assert long["count"] == 20_001, "in a thread, and no longer than a context has to be"

    run_cluster(test)


def test_health_says_why_not(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        async def says(reason: str) -> None:
            await cluster.until(lambda: cluster.router.health_problem() == reason, reason)
            response = await cluster.http.get("/health")
            assert response.status_code == 503
            assert response.json() == {"status": "unavailable", "reason": reason}

        await says("no prefill worker is ready")
        cluster.add(Role.PREFILL)
        cluster.show()
        await says("no decode worker is ready")
        decode = cluster.add(Role.DECODE)
        cluster.show()
        await cluster.healthy()
        assert (await cluster.http.get("/health")).json() == {"status": "ok"}
        await decode.die()
        await says("no link to a decode worker")

    run_cluster(test, prefill=0, decode=0)


def samples_of(response: httpx.Response) -> dict[tuple[str, str | None], float]:
    """By name, and by the worker or the reason of an answer's end."""
    return {
        (sample.name, sample.labels.get("worker") or sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


@pytest.mark.parametrize("interval", [1, 4])
def test_metrics_are_valid_and_count(run_cluster: Run, interval: int) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        for _ in range(2):
            await cluster.http.post("/v1/completions", json={"model": "smollm2", "prompt": "a b c", "max_tokens": 3})
        await cluster.http.post("/v1/completions", json={"model": "smollm2", "prompt": ""})
        response = await cluster.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        samples = samples_of(response)
        while samples["tandem:kv_cache_usage_perc", "decode-0"]:  # its last load report is older than the answer's end
            samples = samples_of(await cluster.http.get("/metrics"))
        assert samples["tandem:generation_tokens_total", None] == 6
        assert samples["tandem:prompt_tokens_total", None] == 6
        assert samples["tandem:request_success_total", "length"] == 2
        assert samples["tandem:time_to_first_token_seconds_count", None] == 2
        assert samples["tandem:inter_token_latency_seconds_count", None] == 4, "each token after the first, however they came"
        assert samples["tandem:e2e_request_latency_seconds_count", None] == 2
        assert samples["tandem:num_requests_running", "prefill-0"] == 0
        assert samples["tandem:worker_restarts_total", "decode-0"] == 0

    run_cluster(test, http={"stream_interval": interval})


def test_tokens_that_no_client_gets_are_not_counted(run_cluster: Run) -> None:
    """Tokens that came in one piece with the end of a stop string, and the one that an echoed prompt is computed for."""

    async def test(cluster: Any) -> None:
        cluster.says("one two three four five six seven eight")
        stopped = await cluster.complete(stop=" three")
        echoed = await cluster.complete(echo=True, max_tokens=0, logprobs=1)
        counts = [response.json()["usage"]["completion_tokens"] for response in (stopped, echoed)]
        assert counts == [3, 0]
        samples = samples_of(await cluster.http.get("/metrics"))
        assert samples["tandem:generation_tokens_total", None] == 3

    run_cluster(test, http={"stream_interval": 4})


def test_status_of_reported_and_unreported_workers(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        dead = cluster.add(Role.DECODE, epoch=3, arithmetic="torch float32 auto (varies)")
        await dead.die()
        cluster.show()
        rows = {row["worker_id"]: row for row in (await cluster.http.get("/admin/status")).json()["workers"]}
        live = rows["prefill-0"]
        assert (live["role"], live["epoch"], live["state"], live["pid"], live["restarts"]) == ("prefill", 1, "ready", 4711, 0)
        assert (live["running"], live["waiting"], live["kv_usage"], live["free_blocks"]) == (0, 0, 0.0, 4096)
        while "decode-1" not in rows:
            rows = {row["worker_id"]: row for row in (await cluster.http.get("/admin/status")).json()["workers"]}
        assert [row["arithmetic"] for row in rows.values()] == [*["fma bfloat16 auto"] * 2, "torch float32 auto (varies)"]
        assert (rows["decode-1"]["restarts"], rows["decode-1"]["running"], rows["decode-1"]["linked"]) == (2, None, False)

    run_cluster(test)


def test_scale_reaches_the_controller(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        response = await cluster.http.post("/admin/scale", json={"prefill": 2, "decode": 3})
        assert response.json() == {"prefill": 2, "decode": 3}
        assert cluster.controller.scaled == [(Role.PREFILL, 2), (Role.DECODE, 3)]
        response = await cluster.http.post("/admin/scale", json={"routers": 64})
        assert response.json() == {"routers": 64}
        response = await cluster.http.post("/admin/scale", json={"decode": 1, "routers": 2})
        assert response.json() == {"decode": 1, "routers": 2}
        assert cluster.controller.scaled[2:] == [(Role.DECODE, 1)]
        assert cluster.controller.routers == [None, 64, 2]

    run_cluster(test)


def test_flip_reaches_the_controller(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        response = await cluster.http.post("/admin/flip", json={"worker_id": "decode-0", "role": "prefill"})
        assert response.json() == {"worker_id": "decode-0", "role": "prefill"}
        assert cluster.controller.flipped == [("decode-0", Duty.PREFILL)]
        both = {"worker_id": "decode-0", "role": "both"}
        assert (await cluster.http.post("/admin/flip", json=both)).json() == both
        assert cluster.controller.flipped[1:] == [("decode-0", Duty.BOTH)]
        for wrong, named in (({"role": "prefill"}, "worker_id"), ({"worker_id": "decode-0", "role": "all"}, "role")):
            refused = await cluster.http.post("/admin/flip", json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, named)
        cluster.controller.away = True
        assert (await cluster.http.post("/admin/flip", json={"worker_id": "d", "role": "decode"})).status_code == 503

    run_cluster(test)


def test_a_pause_reaches_the_controller(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        for action in ("pause", "resume"):
            assert (await cluster.http.post("/admin/autoscale", json={"action": action})).json() == {"action": action}
        assert cluster.controller.autoscaled == ["paused by hand", None]
        refused = await cluster.http.post("/admin/autoscale", json={"action": "stop"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "action")
        assert (await cluster.http.get("/admin/status")).json()["autoscaler"] is None
        assert not cluster.controller.observed, "nobody tells what nobody asks"

    run_cluster(test)


def test_the_autoscaler_hears_what_is_asked(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        usage = (await cluster.complete(max_tokens=3)).json()["usage"]
        await cluster.until(lambda: any(each.counts.ended for each in cluster.controller.observed))
        seen = cluster.controller.observed[-1]
        assert (seen.counts.arrived, seen.counts.first_tokens, seen.counts.ended) == (1, 1, 1)
        assert (seen.counts.prompt_tokens, seen.counts.answer_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert seen.counts.read_tokens == usage["prompt_tokens"]
        assert {worker.role for worker in seen.workers} == set(Role)

    run_cluster(test, autoscale={"sizes": {"prefill": "1..2", "decode": "1..2"}})


def test_drain_reaches_the_controller(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        response = await cluster.http.post("/admin/drain", json={"worker": "decode-1"})
        assert response.json() == {"worker": "decode-1", "restart": False}
        await cluster.http.post("/admin/drain", json={"worker": "prefill-0", "restart": True})
        assert cluster.controller.drained == [("decode-1", False), ("prefill-0", True)]
        for body, named in (({}, "worker"), ({"worker": "decode-1", "when": 1}, "when"), ({"worker": 1}, "worker")):
            refused = await cluster.http.post("/admin/drain", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, named)
        cluster.controller.away = True
        assert (await cluster.http.post("/admin/drain", json={"worker": "decode-1"})).status_code == 503

    run_cluster(test)


def test_caches_are_erased_everywhere_or_it_says_where_not(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        body = {"action": "reset", "tenant": "acme"}
        workers = {worker.ref.worker_id: worker for worker in (*cluster.prefill, *cluster.decode)}
        answer = (await cluster.http.post("/admin/cache", json=body)).json()
        assert answer["tenant"] == "acme"
        assert {row["worker_id"]: row["tier_blocks"] for row in answer["workers"]} == dict.fromkeys(workers, 5)
        assert all(worker.reset == ["acme"] for worker in workers.values())
        everybody = await cluster.http.post("/admin/cache", json={"action": "reset"})
        assert everybody.json()["tenant"] is None
        workers["decode-0"].fail_with = UnavailableError("some are left")
        refused = await cluster.http.post("/admin/cache", json=body)
        assert refused.status_code == 503
        assert "decode-0 did not erase everything" in refused.json()["error"]["message"]
        for wrong, named in (({}, "action"), ({"action": "drop"}, "action"), (body | {"when": 1}, "when")):
            refused = await cluster.http.post("/admin/cache", json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, named)

    run_cluster(test)


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic sesame", "sesame", "Bearer sésame"])
def test_admin_key(run_cluster: Run, header: str | None) -> None:
    async def test(cluster: Any) -> None:
        headers = {} if header is None else {"authorization": header.encode()}
        asked = [("GET", "/admin/status"), ("GET", "/admin/audit"), ("POST", "/admin/scale"), ("POST", "/admin/drain")]
        asked += [("POST", "/admin/cache"), ("POST", "/admin/flip"), ("POST", "/admin/autoscale"), ("POST", "/admin/rollout")]
        for method, path in asked:
            response = await cluster.http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert "operator's key" in response.json()["error"]["message"]
        good = await cluster.http.get("/admin/status", headers={"authorization": "Bearer sesame"})
        assert good.status_code == 200

    run_cluster(test, http=HttpConfig(admin_key="sesame").model_dump())


@pytest.mark.parametrize(("bound", "peer", "status"), [("127.0.0.1", "127.0.0.1", 200), ("127.0.0.1", "10.0.0.7", 403)])
def test_without_keys_only_loopback_is_served(run_cluster: Run, bound: str, peer: str, status: int) -> None:
    async def test(cluster: Any) -> None:
        transport = httpx.ASGITransport(create_app(cluster.router, cluster.meter, cluster.recorder), client=(peer, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for path in ("/admin/status", "/v1/models", "/metrics"):
                assert (await http.get(path)).status_code == status
                for name in ("x-forwarded-for", "x-real-ip", "forwarded", "via"):
                    assert (await http.get(path, headers={name: "127.0.0.1"})).status_code == 403, "whose it is nobody knows"
            assert (await http.get("/health")).status_code == 200

    run_cluster(test, http=HttpConfig(host=bound).model_dump())


_EVERYWHERE, _HERE = "0.0.0.0", "127.0.0.1"


@pytest.mark.parametrize(
    ("http", "statuses"),
    [
        # without a key, with the metrics' key, with the operator's, with a wrong one
        (HttpConfig(host=_HERE), (200, 200, 200, 200)),
        (HttpConfig(host=_HERE, admin_key="sesame"), (200, 200, 200, 200)),
        (HttpConfig(host=_HERE, metrics_key="look"), (401, 200, 401, 401)),
        (HttpConfig(host=_EVERYWHERE), (403, 403, 403, 403)),
        (HttpConfig(host=_EVERYWHERE, admin_key="sesame"), (401, 401, 200, 401)),
        (HttpConfig(host=_EVERYWHERE, admin_key="sesame", metrics_key="look"), (401, 200, 200, 401)),
    ],
)
def test_who_may_read_the_metrics(run_cluster: Run, http: HttpConfig, statuses: tuple[int, ...]) -> None:
    async def test(cluster: Any) -> None:
        keys = (None, "look", "sesame", "wrong")
        headers = [{} if key is None else {"authorization": f"Bearer {key}"} for key in keys]
        found = [await cluster.http.get("/metrics", headers=each) for each in headers]
        assert tuple(answer.status_code for answer in found) == statuses
        for answer in found:
            if answer.status_code != 200:
                assert "http.metrics_key" in answer.json()["error"]["message"]
        if http.admin_key is not None:
            as_watcher = await cluster.http.get("/admin/status", headers=headers[1])
            assert as_watcher.status_code == 401, "who reads metrics is no operator"

    run_cluster(test, http=http.model_dump())


def test_a_pods_address_is_a_good_host_for_probes_and_for_metrics_with_their_key(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        pod = {"host": "10.1.2.3:8000"}
        paths = ("/live", "/ready", "/health", "/metrics", "/v1/models")
        found = [await cluster.http.get(path, headers=pod) for path in paths]
        assert [answer.status_code for answer in found] == [200, 200, 200, 401, 403]
        assert found[-1].json()["error"]["param"] == "host"
        assert (await cluster.http.get("/metrics", headers={**pod, "authorization": "Bearer look"})).status_code == 200

    run_cluster(test, http=HttpConfig(host=_EVERYWHERE, allowed_hosts=["llm.example.com"], metrics_key="look").model_dump())


def test_admin_is_closed_when_bound_to_the_world_without_a_key(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        response = await cluster.http.get("/admin/status")
        assert response.status_code == 403, "the peer may be a proxy on loopback that anyone reaches"
        assert "http.admin_key" in response.json()["error"]["message"]

    run_cluster(test, http=HttpConfig(host="0.0.0.0").model_dump())


def test_request_ids(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        given = await cluster.http.get("/v1/models", headers={"x-request-id": "mine-1"})
        assert given.headers.get_list("x-request-id") == ["mine-1"]
        for path, status in (("/v1/completions", 200), ("/v1/chat/completions", 400), ("/v1/nothing", 404)):
            headers = {"x-request-id": "mine-2", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
            body = {"model": "smollm2", "prompt": "a", "max_tokens": 2, "stream": True}
            answer = await cluster.http.post(path, json=body, headers=headers)
            assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["mine-2"])
        made = await cluster.http.get("/nothing", headers={"x-request-id": "x" * 200})
        assert len(made.headers["x-request-id"]) == 32
        transport = httpx.ASGITransport(create_app(cluster.router, cluster.meter, cluster.recorder, echo_request_id=False))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert "x-request-id" not in (await http.get("/v1/models")).headers
        bodies = [{"model": "smollm2", "prompt": "a", "max_tokens": 5}] * 2
        same = [cluster.http.post("/v1/completions", json=body, headers={"x-request-id": "same"}) for body in bodies]
        assert [response.status_code for response in await asyncio.gather(*same)] == [200, 200]
        assert len({message.request_id for message in cluster.prefill[0].seen}) == 3, "clients' ids need not be unique"

    run_cluster(test)


def test_bug_of_ours_is_a_500_without_details(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.router.status = None
        response = await cluster.http.get("/admin/status")
        assert response.status_code == 500
        assert response.json()["error"] == {
            "message": "internal error; the router's log has the details",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert "x-request-id" in response.headers

    run_cluster(test)


def test_the_document_is_made_beside_the_streams(run_cluster: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = []

    def noted(app: DocumentedApp) -> Any:
        made_by.append(threading.current_thread())
        return make(app)

    make = DocumentedApp.openapi
    monkeypatch.setattr(DocumentedApp, "openapi", noted)

    async def test(cluster: Any) -> None:
        answers = [await cluster.http.get("/openapi.json") for _ in range(2)]
        assert [(answer.status_code, answer.headers["content-type"]) for answer in answers] == [(200, "application/json")] * 2
        assert answers[0].content == answers[1].content
        assert len(made_by) == 1
        assert made_by[0] is not threading.current_thread()
        assert (await cluster.http.get("/docs")).status_code == 404

    run_cluster(test)


def test_openapi_describes_the_bodies(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        document = (await cluster.http.get("/openapi.json")).json()
        schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["required"]) == {"model", "prompt"}
        assert schema["additionalProperties"] is False
        responses = document["paths"]["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(responses["required"]) == {"model", "input"}
        assert "$ref" not in str(document["paths"])
        responses = document["paths"]["/v1/completions"]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "403", "404", "408", "413", "415", "429", "500", "503"}
        assert set(document["paths"]["/v1/models"]["get"]["responses"]) == {"200", "401", "403", "500"}
        assert "retry-after" in responses["429"]["headers"]
        assert "security" not in document["paths"]["/v1/completions"]["post"], "this cluster asks for no keys"

    run_cluster(test)

"""Lost workers: a client sees a pause at worst, never a lost, doubled or changed token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import ContextLengthError, IncompatiblePeerError, WorkerLostError
from protocol.messages.common import Failed
from protocol.messages.decode import Reserved
from protocol.messages.prefill import Prefill
from protocol.messages.workers import Duty, Role

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"
FAST = {"heartbeat_s": 0.05, "lease_s": 0.5, "queue_s": 5.0}


def test_stream_goes_on_when_its_decode_worker_dies(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.005
        for worker in cluster.decode:
            worker.die_after = 3
        cluster.add(Role.DECODE)
        cluster.show()
        cluster.prefill[0].cached_tokens = 1
        body = (await cluster.complete(return_token_ids=True, seed=5, cache_salt="a")).json()
        choice = body["choices"][0]
        assert choice["text"] == TEXT, "nothing lost, doubled or changed"
        assert choice["token_ids"] == list(cluster.script.answer)
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}, "of the first attempt alone"
        resumed = [message for worker in cluster.prefill for message in worker.seen if message.num_generated]
        assert resumed
        assert all(
            message.token_ids[-message.num_generated :] == cluster.script.answer[: message.num_generated]
            and message.sampling.seed == 5
            and message.cache_salt == "a"
            for message in resumed
        )
        metrics = (await cluster.http.get("/metrics")).text
        assert f'tandem:resumed_streams_total{{model_name="smollm2",router="router-0"}} {float(len(resumed))}' in metrics
        await cluster.clean()

    run_cluster(test, decode=2)


def test_stream_goes_on_where_it_is_decoded_while_prefill_is_busy(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.05
        stream = asyncio.ensure_future(cluster.complete(return_token_ids=True))
        await cluster.until(lambda: any(worker.attached for worker in cluster.decode))
        [busy] = [worker for worker in cluster.decode if worker.attached]
        [other] = [worker for worker in cluster.decode if not worker.attached]
        cluster.prefill[0].gate.clear()
        waiting = asyncio.ensure_future(cluster.complete(prompt=TEXT))
        await cluster.until(lambda: cluster.prefill[0].working)
        await busy.die()
        assert (await stream).json()["choices"][0]["token_ids"] == list(cluster.script.answer)
        assert [message.first_token for message in other.attached] == [None], "it has computed the prompt itself"
        cluster.prefill[0].gate.set()
        assert (await waiting).json()["choices"][0]["text"] == TEXT
        await cluster.clean()

    run_cluster(test, decode=2, max_batch_tokens=4)


def test_request_waits_for_the_only_worker_to_come_back(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].die_after = 4
        task = asyncio.ensure_future(cluster.complete(return_token_ids=True))
        await cluster.until(lambda: not cluster.router._roster.ready(Role.DECODE))
        assert (await cluster.http.get("/health")).status_code == 503
        again = cluster.add(Role.DECODE, worker_id="decode-0", epoch=2)
        cluster.show(cluster.prefill[0], again)
        assert (await task).json()["choices"][0]["text"] == TEXT
        await cluster.healthy()

    run_cluster(test)


def test_prefill_death_is_retried_elsewhere(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        for worker in cluster.prefill:
            worker.gate.clear()
        task = asyncio.ensure_future(cluster.complete())
        await cluster.until(lambda: any(worker.working for worker in cluster.prefill))
        [busy] = [worker for worker in cluster.prefill if worker.working]
        [idle] = [worker for worker in cluster.prefill if not worker.working]
        idle.gate.set()
        await busy.die()
        assert (await task).json()["choices"][0]["text"] == TEXT
        assert len(idle.seen) == 1
        await cluster.clean()

    run_cluster(test, prefill=2)


def test_decode_death_during_prefill_stops_the_prefill(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.prefill[0].gate.clear()
        task = asyncio.ensure_future(cluster.complete())
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        [holder] = [worker for worker in cluster.decode if worker.tickets]
        await holder.die()
        await cluster.until(lambda: bool(cluster.prefill[0].cancelled), "the prefill went on for a lost ticket")
        cluster.prefill[0].gate.set()
        assert (await task).json()["choices"][0]["text"] == TEXT
        await cluster.clean()

    run_cluster(test, decode=2)


def test_silent_worker_is_lost_after_its_lease(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.prefill[0].gate.clear()
        task = asyncio.ensure_future(cluster.complete())
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        cluster.prefill[0].endpoint._report = stopped  # its socket stays open, but nothing comes any more
        cluster.add(Role.PREFILL)
        cluster.show()
        assert (await task).json()["choices"][0]["text"] == TEXT
        assert (await cluster.http.get("/health")).status_code == 200

    def stopped() -> Any:
        raise ConnectionError("the process is stopped")

    run_cluster(test, limits=FAST)


@pytest.mark.parametrize("leases", [1.5, 2.5])
def test_a_router_that_was_held_gives_no_worker_up_whose_answer_lies_unread(run_cluster: Run, leases: float) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        [decode] = cluster.decode
        send, held = decode.send, False

        def send_and_hold(peer: bytes, message: Any) -> None:
            nonlocal held
            send(peer, message)
            if isinstance(message, Reserved) and not held:
                held = True
                time.sleep(leases * FAST["lease_s"])  # the whole loop, and so the router

        decode.send = send_and_hold
        assert (await cluster.complete()).json()["choices"][0]["text"] == TEXT
        assert held
        metrics = (await cluster.http.get("/metrics")).text
        assert 'tandem:workers_lost_total{model_name="smollm2",router="router-0"} 0.0' in metrics
        await cluster.clean()

    run_cluster(test, limits=FAST)


def test_transfer_failure_is_retried_and_counted(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].refuse_attach = 2
        assert (await cluster.complete()).json()["choices"][0]["text"] == TEXT
        metrics = (await cluster.http.get("/metrics")).text
        assert 'tandem:kv_transfer_failures_total{model_name="smollm2",router="router-0"} 2.0' in metrics
        await cluster.clean()

    run_cluster(test)


def test_third_failure_is_the_last(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].refuse_attach = 3
        response = await cluster.complete()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "kv_transfer_failed"
        assert response.headers["retry-after"] == "1"
        await cluster.clean()

    run_cluster(test)


def test_failure_after_the_first_byte_is_an_event(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].error_after = 0
        response = await cluster.complete(stream=True)
        assert response.status_code == 200
        lines = [line for line in response.text.split("\n") if line]
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["code"] == "kv_transfer_failed"
        assert error["type"] == "server_error"
        assert "[DONE]" not in response.text
        await cluster.clean()

    run_cluster(test)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthError("too long", param="prompt"), 400, "context_length_exceeded"),
        (IncompatiblePeerError("dtype: float32 here, bfloat16 there"), 500, "incompatible_peer"),
    ],
)
def test_refusals_of_workers_reach_the_client_and_are_not_retried(run_cluster: Run, error: Any, status: int, code: str) -> None:
    async def test(cluster: Any) -> None:
        asked = 0

        def refuse(peer: bytes, message: Any) -> None:
            nonlocal asked
            asked += 1
            cluster.prefill[0].send(peer, Failed.from_error(message.call_id, error))

        cluster.prefill[0].endpoint._handlers[Prefill] = refuse
        response = await cluster.complete()
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert asked == 1
        await cluster.clean()

    run_cluster(test)


def test_what_a_worker_that_flips_sends_back_is_no_sign_of_an_unreachable_pair(run_cluster: Run) -> None:
    """The prompt waited there for longer than it takes to give up a way between two workers."""

    async def test(cluster: Any) -> None:
        roster, admission = cluster.router._roster, cluster.router._admission
        [computes, other], [decode] = roster.ready(Role.PREFILL), roster.ready(Role.DECODE)
        claim: Any = SimpleNamespace(lost=set(), here=False, age_s=1e3, computes=computes, decode=decode)
        claim.workers = [computes, decode]
        error, pair = WorkerLostError("no prefill worker any more"), (computes.ref.worker_id, decode.ref.worker_id)
        computes.duty = Duty.DECODE
        assert admission.note_failure(claim, error) == set(pair)
        assert admission._unreached.pairs(time.monotonic()) == set()
        computes.duty = Duty.BOTH
        assert admission.note_failure(claim, error) == {*pair, other.ref.worker_id}
        assert admission._unreached.pairs(time.monotonic()) == {pair}

    run_cluster(test, prefill=2)


def test_a_handoff_that_decode_hears_nothing_of_ends_by_the_word_of_prefill(run_cluster: Run) -> None:
    """The two don't reach each other, and the router reaches both. Later requests don't try the pair again."""

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        [prefill], [decode] = cluster.prefill, cluster.decode
        prefill.handoff_s = 1.1
        decode.kv_gate.clear()
        body = (await cluster.complete(return_token_ids=True)).json()
        assert body["choices"][0]["token_ids"] == list(cluster.script.answer)
        assert [message.first_token for message in decode.attached] == [None], "it has computed the prompt itself"
        body = (await cluster.complete(return_token_ids=True)).json()
        assert body["choices"][0]["token_ids"] == list(cluster.script.answer)
        assert len(prefill.seen) == 1
        await cluster.clean()

    run_cluster(test, disaggregation="auto", limits=FAST | {"lease_s": 2.0})


def test_a_handoff_may_take_longer_than_leases(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].kv_gate.clear()
        asking = asyncio.ensure_future(cluster.complete())
        await cluster.until(lambda: bool(cluster.prefill[0].seen))
        await asyncio.sleep(2.0)  # four leases
        cluster.decode[0].kv_gate.set()
        assert (await asking).json()["choices"][0]["text"] == TEXT
        assert len(cluster.prefill[0].seen) == 1, "the KV that was on its way is what decode went on with"
        await cluster.clean()

    run_cluster(test, limits=FAST)


def test_nobody_waits_for_the_kv_of_a_lost_prefill_worker(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].kv_gate.clear()
        asking = asyncio.ensure_future(cluster.complete())
        await cluster.until(lambda: any(worker.seen for worker in cluster.prefill))
        [sender] = [worker for worker in cluster.prefill if worker.seen]
        await cluster.until(lambda: not sender.working)  # it has sent the first token
        await sender.die()
        [other] = [worker for worker in cluster.prefill if worker is not sender]
        await cluster.until(lambda: bool(other.seen))
        cluster.decode[0].kv_gate.set()
        assert (await asking).json()["choices"][0]["text"] == TEXT
        await cluster.clean()

    run_cluster(test, prefill=2, limits=FAST)


def test_what_a_worker_says_of_a_handoff_that_is_over_changes_nothing(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.02
        cluster.prefill[0].handoff_s = 0.05
        body = (await cluster.complete(return_token_ids=True)).json()
        assert body["choices"][0]["token_ids"] == list(cluster.script.answer)
        assert len(cluster.prefill[0].seen) == len(cluster.decode[0].attached) == 1
        await cluster.clean()

    run_cluster(test)

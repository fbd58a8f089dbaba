"""Peers that know the secret and claim what is not so: false addresses, lives, tickets and answers. Nobody else is harmed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from kv_transfer.transports.loopback import LoopbackNetwork
from protocol.errors import InvalidRequestError, ProtocolError, TandemError
from protocol.messages.common import Failed
from protocol.messages.decode import Attach, Release, Reserve, Reserved
from protocol.messages.handoff import PairOpen, PairOpened, PushAnnounce, PushPosted, PushSegment, TransferAbort
from protocol.messages.prefill import Cancel, Prefill
from protocol.messages.workers import KvLayout, Ticket, WorkerRef
from protocol.trace import TraceContext, new_trace
from protocol.wire import WireServer
from tests.fault.company import MIB, PROMPT, company, insiders
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of, run
from tests.fault.two_workers import SECRET

_TICKET = Ticket(1, 1, WorkerRef("false", 1, ""), 8, (1, 2), len(PROMPT), 0)


ADDRESSES = ["", "nonsense", "tcp://127.0.0.1:1", "inproc://x", "tcp://" + "x" * 100_000 + ":1", "its own"]


@pytest.mark.parametrize("address", ADDRESSES, ids=lambda address: address[:20])
def test_a_ticket_that_leads_nowhere_is_refused(two_workers: Factory, reference: Reference, address: str) -> None:
    """A prefill worker goes to the address that a ticket names, which may be its own."""

    async def scenario() -> None:
        async with company(two_workers, reference) as here:
            ticket = await here.router.reserve(PROMPT, 8)
            there = here.workers.prefill.me.address if address == "its own" else address
            for epoch, worker_id in ((1, "decode-0"), (7, "decode-0"), (0, "x" * 1_000_000)):
                false = dataclasses.replace(ticket, worker=WorkerRef(worker_id, epoch, there))
                with pytest.raises(TandemError):
                    await here.router.compute(false, PROMPT, greedy(8))
            here.router.decode.send(Release(ticket.ticket_id))

    run(scenario())


def test_a_false_decode_worker_hangs_no_prompt(two_workers: Factory, reference: Reference) -> None:
    """It knows the secret, and answers with anything but what was asked: another type, an error out of place, or not at all."""

    def wrong(call_id: int) -> list[Any]:
        refusal = Failed(call_id, "invalid_request", "no", None, None)
        return [Reserved(call_id, _TICKET), refusal, PushPosted(call_id, (0,)), Failed(0, "", "", None, None)]

    async def answer(server: WireServer, network: LoopbackNetwork, kind: type[Any], which: int) -> None:
        while True:
            peer, message = await server.receive()
            if type(message) is kind:
                server.send(peer, wrong(message.call_id)[which])
            elif isinstance(message, PairOpen):
                network.pipe(message.rendezvous, 1)
                server.send(peer, PairOpened(message.call_id, b""))

    async def scenario() -> None:
        async with company(two_workers, reference) as here:
            for which, kind in [*itertools.product(range(3), (PairOpen, PushAnnounce)), (3, PushAnnounce)]:
                server = WireServer(SECRET, "127.0.0.1")
                answering = asyncio.create_task(answer(server, here.workers.network, kind, which))
                false = WorkerRef(f"false-{which}", 1, server.address)
                with suppress(TandemError):  # the first token may come before the push fails
                    await here.router.compute(dataclasses.replace(_TICKET, worker=false), PROMPT, greedy(8))
                left = [job for job in here.workers.prefill._jobs if job.message.ticket.worker == false]

                def ended(left: Sequence[object] = left) -> bool:
                    return not set(left) & set(here.workers.prefill._jobs)

                await here.workers.until(ended, 10)
                answering.cancel()
                server.close()

    run(scenario())


def test_another_router_s_transfer_can_t_be_touched(two_workers: Factory, reference: Reference) -> None:
    """A ticket's number can be guessed; what it takes to fill or abort it can't. In one step with the true prompt, too."""

    async def scenario() -> None:
        async with company(two_workers, reference) as here, insiders(here.addresses) as (at_prefill, at_decode):
            long = prompt_of(120, 4)
            for number in range(10):
                ticket = await here.router.reserve(long, 8)
                guesses = [ticket.transfer_id + 1, ticket.ticket_id, ticket.ticket_id + (1 << 32), 0, -1]
                for guess in guesses:
                    forged = dataclasses.replace(ticket, transfer_id=guess)
                    at_prefill.send(
                        Prefill(
                            guess % 1000, "r", forged, tuple(prompt_of(120, 5)), 0, greedy(8), str(number), new_trace(), False
                        )
                    )
                    at_prefill.send(Cancel("r"))
                    at_decode.send(
                        TransferAbort(ticket.ticket_id, guess),
                        PushAnnounce(1, (PushSegment(ticket.ticket_id, guess, 0, 40),)),
                        Release(ticket.ticket_id),
                        Attach(2, ticket.ticket_id, 1, greedy(8), 1),
                    )
                first = await here.router.compute(ticket, long, greedy(8), cache_salt=f"true {number}")
                await here.router.attach(ticket, first, greedy(8))
                assert [first.token_id, *await here.router.rest(ticket)] == reference(long, 8)
                here.router.decode.send(Release(ticket.ticket_id))

    run(scenario())


def test_a_token_outside_the_vocabulary_is_refused_at_once(two_workers: Factory, reference: Reference) -> None:
    """It would be computed only after a preemption."""

    async def scenario() -> None:
        async with company(two_workers, reference) as here:
            for token in (-1, 101, 2**31, 2**63 - 1, -(2**63), 2**64 - 1):
                with pytest.raises(InvalidRequestError, match="token ids"):
                    await here.router.reserve([1, token, 2], 4)

    run(scenario())


def test_a_trace_that_would_spoil_the_log_is_refused(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with company(two_workers, reference) as here:
            ticket = await here.router.reserve(PROMPT, 8)
            claims: list[dict[str, Any]] = [
                {"trace_id": "x" * MIB},
                {"trace_id": "end=stop"},
                {"span_id": ""},
                {"state": "x" * 513},
            ]
            for false in claims:
                trace = dataclasses.replace(new_trace(), **false)

                def reserve(call_id: int, trace: TraceContext = trace) -> Reserve:
                    return Reserve(call_id, "r", (1,), 4, "", trace, 0)

                def prefill(call_id: int, trace: TraceContext = trace) -> Prefill:
                    return Prefill(call_id, "r", ticket, tuple(PROMPT), 0, greedy(8), "", trace, False)

                with pytest.raises(ProtocolError, match="trace context"):
                    await here.router.decode.ask(reserve, 10)
                with pytest.raises(ProtocolError, match="trace context"):
                    await here.router.prefill.ask(prefill, 10)
            here.router.decode.send(Release(ticket.ticket_id))

    run(scenario())


def test_an_answer_that_is_too_large_becomes_a_refusal(two_workers: Factory, reference: Reference) -> None:
    """An error names what the peer sent, so it can be larger than any message."""

    async def scenario() -> None:
        async with company(two_workers, reference) as here, insiders(here.addresses[1:]) as (at_decode,):
            half = "x" * (8 * MIB - 60)
            me = WorkerRef(half, 1, "")
            at_decode.send(PairOpen(5, me, 1, KvLayout(half, "", "", 0, 0, 0, 0, "cpu"), 0, "", b""))
            answer = await at_decode.answer_to(5)
            assert isinstance(answer, Failed)

    run(scenario())

"""Real workers among strangers and among peers that know the secret and misbehave.

Whatever these send, a well-behaved router goes on getting right answers, no worker dies or waits for ever, every question
that is refused is answered, memory stays bounded, and in the end nothing is held: `run_two_workers` ends with an audit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import typing
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any

import pytest
import zmq

from protocol.codec import _CLASSES, encode
from protocol.messages.common import Failed, Ping
from protocol.messages.decode import Attach, Release, Reserve, Reserved
from protocol.messages.handoff import PairOpen, PushAnnounce, PushCommit, PushPosted
from protocol.messages.prefill import Prefill
from protocol.messages.workers import KvLayout, Role, WorkerRef
from protocol.sampling import SamplingParams
from protocol.wire import WIRE_VERSION
from tests.cases import THOROUGH
from tests.fault.company import PROMPT, Insider, company, insiders
from tests.fault.scenarios import Factory, Reference, greedy, run
from tests.fault.two_workers import SECRET
from tests.hostile_peers import RAW, dealer, idle_connections, say

SEEDS = range(6 if THOROUGH else 1)
ROUNDS = 150 if THOROUGH else 40
"""With every message type once or twice in each, at both workers."""


def test_strangers_harm_nobody(two_workers: Factory, reference: Reference, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes of all kinds, connections by the thousand, and ZeroMQ without our handshake, at both workers."""

    async def scenario() -> None:
        async with company(two_workers, reference) as here:
            for address in here.addresses:
                await asyncio.gather(*(say(address, data) for data in RAW.values()))
                async with idle_connections(address, 4000 if THOROUGH else 500):
                    await here.goes_on()
                for secret in (None, b"wrong" * 8, SECRET):
                    with dealer(address, secret) as stranger:
                        for body in (encode(Ping()), WIRE_VERSION + b"n" * 32, b"p" * 32, encode(Release(1))):
                            with suppress(zmq.Again):  # hung up on
                                stranger.send(body, zmq.DONTWAIT)
                        await here.goes_on()

    run(scenario())
    assert "refused a connection" in caplog.text
    assert "refused a peer" in caplog.text


NUMBERS = [-(2**63), -(2**62), -1, 0, 1, 2, 3, 8, 100, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1]


class Maker:
    """Valid messages of any type, of numbers that may be anything, with ids and references that may be the true ones."""

    def __init__(self, seed: int, known: dict[type[Any], list[Any]]) -> None:
        self._rng = random.Random(seed)
        self._known = known
        self._call_ids = itertools.count(1)

    def any(self, kind: type[Any]) -> Any:
        """`call_id` is always a fresh one."""
        hints = typing.get_type_hints(kind)
        values = {field.name: self._value(hints[field.name], field.name) for field in dataclasses.fields(kind)}
        if "call_id" in values and kind in _CLASSES.values():
            values["call_id"] = next(self._call_ids)
        return kind(**values)

    def times(self) -> int:
        return self._rng.choice([1, 1, 2])

    def garbage(self) -> bytes:
        return self._rng.randbytes(20)

    def _value(self, hint: Any, name: str) -> Any:
        rng = self._rng
        if hint in self._known and rng.random() < 0.7:
            return rng.choice(self._known[hint])
        if typing.get_origin(hint) is tuple:
            count = rng.choice([0, 1, 2, 40])
            small = name in ("token_ids", "prompt_token_ids") and rng.random() < 0.7
            (inner, _) = typing.get_args(hint)
            return tuple(rng.randrange(1, 101) if small else self._value(inner, name) for _ in range(count))
        if typing.get_args(hint):
            return self._value(rng.choice(typing.get_args(hint)), name)
        if isinstance(hint, type) and issubclass(hint, Enum):
            return rng.choice(list(hint))
        if dataclasses.is_dataclass(hint):
            return self.any(typing.cast(type, hint))
        choices: dict[Any, Callable[[], Any]] = {
            int: lambda: rng.choice(NUMBERS) if rng.random() < 0.5 else rng.randrange(50),
            float: lambda: rng.choice([0.0, 1.0, 0.5, -1.0, 1e-50, 1e308, float("nan"), float("inf")]),
            str: lambda: rng.choice(["", "r", "decode-0", "loopback", "x" * 5000, "\0\n", "tcp://127.0.0.1:1"]),
            bytes: lambda: rng.choice([b"", b"1", rng.randbytes(64)]),
            bool: lambda: rng.random() < 0.5,
            type(None): lambda: None,
        }
        return choices[hint]()


@pytest.mark.parametrize("seed", SEEDS)
def test_any_message_of_an_insider(
    two_workers: Factory, reference: Reference, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """Every type of message, at both workers, in any order, twice now and then, with true and false ids and impossible numbers.

    And garbage. Each question gets an answer, whatever it is.
    """
    questions: set[type] = {Reserve, Attach, Prefill, PairOpen, PushAnnounce, PushCommit}
    wrong_for: dict[Role, set[type]] = {Role.PREFILL: questions - {Prefill}, Role.DECODE: {Prefill}}

    async def scenario() -> None:
        async with company(two_workers, reference) as here, insiders(here.addresses) as (at_prefill, at_decode):
            workers = here.workers
            ticket = await here.router.reserve(PROMPT, 8)
            known: dict[type[Any], list[Any]] = {
                type(ticket): [ticket],
                WorkerRef: [workers.prefill.me, workers.decode.me],
                KvLayout: [workers.decode.core.arrivals._layout],
                SamplingParams: [greedy(1), greedy(4), dataclasses.replace(greedy(5), temperature=1e-50)],
            }
            maker = Maker(seed, known)
            asked: list[tuple[Insider, Any]] = []
            for number in range(ROUNDS):
                for peer, role in ((at_prefill, Role.PREFILL), (at_decode, Role.DECODE)):
                    for kind in _CLASSES.values():
                        message = maker.any(kind)
                        peer.send(*([message] * maker.times()))
                        if kind in wrong_for[role] or kind in (Reserve, Attach, PushAnnounce):
                            asked.append((peer, message))
                        await asyncio.sleep(0)  # making them takes this loop's time, which is the workers' too
                    peer.send(maker.garbage(), b"", encode(Release(1))[:-1], encode(Ping()) + b"x")
                if number % 10 == 0:
                    at_decode.send(*(Release(a.ticket.ticket_id) for a in at_decode.answers if isinstance(a, Reserved)))
                    await here.goes_on()
                    workers.decode.ledger.check_integrity()
                    workers.check()
            for peer, message in asked[-200:]:
                answer = await peer.answer_to(message.call_id)
                assert isinstance(answer, Failed | Reserved | PushPosted), (message, answer)
            here.router.decode.send(Release(ticket.ticket_id))

    run(scenario())
    assert "refused a message" in caplog.text
    assert "dropped a message" in caplog.text

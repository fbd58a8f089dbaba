"""What fits together meets over the best transport that works; what does not is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from kv_transfer.lanes import LocalReceiveRank
from kv_transfer.pool_view import PoolView
from kv_transfer.remote_lanes import ReceiveHost, RemoteReceiveRank
from kv_transfer.sender import OutgoingTransfer, PushPart
from kv_transfer.transport import SendChannel, SendTransport, TransportError
from kv_transfer.transports.loopback import LoopbackNetwork
from protocol.errors import IncompatiblePeerError, KvTransferError, TransportUnavailableError, WorkerLostError
from protocol.gang import HeadMove
from tests.unit.kv_transfer.two_ends import (
    DONE,
    EVERY_TRANSPORT,
    HEAD_DIM,
    HEADS,
    LAYERS,
    LAYOUT,
    Kind,
    World,
    world,
)


@pytest.mark.parametrize(
    "difference",
    [
        {"model_hash": "other"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"num_layers": LAYERS + 1},
        {"num_kv_heads": HEADS * 2},
        {"head_dim": HEAD_DIM * 2},
        {"layout_version": 2},
        {"memory": "cuda"},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_every_difference_of_the_layouts_is_named(difference: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with world(["shared_memory", "gloo"]) as w:
            name, value = next(iter(difference.items()))
            message = f"decode-0 .here. and prefill-0 .there. differ: {name}: {getattr(LAYOUT, name)} here, {value} there$"
            with pytest.raises(IncompatiblePeerError, match=message):
                await w.pair(replace(LAYOUT, **difference))

    asyncio.run(scenario())


@EVERY_TRANSPORT
def test_a_former_life_and_several_differences_are_refused(kind: Kind) -> None:
    async def scenario() -> None:
        async with world([kind]) as w:
            with pytest.raises(
                IncompatiblePeerError, match="dtype: float32 here, bfloat16 there; layout_version: 1 here, 2 there"
            ):
                await w.pair(replace(LAYOUT, dtype="bfloat16", layout_version=2))
            with pytest.raises(WorkerLostError, match="epoch 5, not 4"):
                await w.pair(peer=replace(w.decode.ref, epoch=4))

    asyncio.run(scenario())


class ElsewhereSender:
    """Shared memory as decode sees it from another host: the offer arrives, but nobody listens there."""

    name = "shared_memory"

    def __init__(self, here: SendTransport) -> None:
        self._here = here

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        return self._here.connect_sender(lambda offer: exchange(bytes(32) + offer[32:]), pool, deadline_s)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TransportUnavailableError("this host has no such prefill worker"), TransportUnavailableError),
        (KvTransferError("too many open files"), TransportError),
        (TransportError("the peer is lost"), TransportError),
        (MemoryError("none is left"), TransportError),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
)
def test_what_keeps_another_rank_from_a_lane_is_told_as_what_it_is(error: Exception, told: type[Exception]) -> None:
    """A transport that is not to be had there makes way for the next one."""

    class Rank:
        async def accept(self, *args: Any) -> None:
            raise error

    host = ReceiveHost(cast(LocalReceiveRank, Rank()))

    async def ask(build: Callable[[int], Any], kind: type[Any], *, until_lost: bool = False) -> Any:
        question = build(1)
        return await host.handlers[type(question)](question)

    async def scenario() -> None:
        remote = RemoteReceiveRank(ask, ["shared_memory", "gloo"])
        with pytest.raises(told, match=str(error)) as caught:
            await remote.accept(HeadMove(0, 0, 0, 0, 1), "shared_memory", b"", lambda ours: None)
        assert type(caught.value) is told
        await host.close()

    asyncio.run(scenario())


async def one_transfer(w: World) -> None:
    pair = await w.pair()
    ticket, entry = w.decode.ticket(8)
    transfer = OutgoingTransfer(ticket)
    await pair.push(DONE, [PushPart(transfer, [1, 2], 0, 8)])
    await pair.commit(transfer)
    assert torch.equal(w.decode.content(entry, 8), w.source.data[:, :, 1:3].flatten(2, 3))
    await pair.close()


def test_the_first_transport_that_works_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        for prefill, decode, taken in (
            (["shared_memory", "gloo"], ["gloo", "shared_memory"], "shared_memory"),
            (["gloo", "shared_memory"], ["gloo", "shared_memory"], "gloo"),
            (["shared_memory", "gloo"], ["gloo"], "gloo (shared_memory: decode-0 has gloo)"),
        ):
            async with world(prefill, decode) as w:
                caplog.clear()
                await one_transfer(w)
                assert f"KV to decode-0 goes over {taken}" in caplog.messages
        async with world(["shared_memory", "gloo"]) as w:
            w.transports = [ElsewhereSender(w.transports[0]), w.transports[1]]
            caplog.clear()
            await one_transfer(w)
            assert "KV to decode-0 goes over gloo (shared_memory: this host has no such prefill worker)" in caplog.messages

    with caplog.at_level("INFO"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    "error",
    [KvTransferError("too many open files"), TransportError("the rank is lost"), RuntimeError("a broken pool")],
    ids=lambda error: type(error).__name__,
)
def test_a_lane_that_a_rank_can_not_accept_is_refused_at_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(build: Callable[[int], Any], kind: type[Any], *, until_lost: bool = False) -> Any:
        raise error

    monkeypatch.setattr(LocalReceiveRank, "accept", RemoteReceiveRank(ask, ["loopback"]).accept)

    async def scenario() -> None:
        async with world([LoopbackNetwork()]) as w, asyncio.timeout(2):
            with pytest.raises(KvTransferError, match=str(error)):
                await w.pair()

    asyncio.run(scenario())


def test_no_common_transport_names_both_sides() -> None:
    async def scenario() -> None:
        async with world(["shared_memory"], ["gloo"]) as w:
            expected = "prefill-0 and decode-0 have no KV transport in common .shared_memory: decode-0 has gloo.$"
            with pytest.raises(IncompatiblePeerError, match=expected):
                await w.pair()

    asyncio.run(scenario())


@pytest.mark.parametrize("prefill", ["gloo", "gloo_encrypted"])
def test_workers_that_do_not_agree_about_encryption_refuse_each_other(prefill: Kind) -> None:
    decode = "gloo" if prefill == "gloo_encrypted" else "gloo_encrypted"

    async def scenario() -> None:
        async with world([prefill], [decode]) as w:
            with pytest.raises(IncompatiblePeerError, match=f"in common .{prefill}: decode-0 has {decode}.$"):
                await w.pair()

    asyncio.run(scenario())

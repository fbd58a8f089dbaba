"""Pools that are shared between processes: read-only for the reader, sealed, refused to strangers, gone with their owner."""

from __future__ import annotations

import os
import secrets
import socket
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from engine.memory.kv_pool import KVPool
from kv_transfer.plan import SlotRun
from kv_transfer.pool_view import CpuPoolView, Slots
from kv_transfer.transport import ReceiveChannel, SendChannel, TransportError
from kv_transfer.transports.same_host import Offer
from kv_transfer.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender

LAYERS, SLOTS = 3, 32


def pool(num_blocks: int = 8, num_layers: int = LAYERS) -> KVPool:
    made = KVPool(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.bfloat16,
        shared=True,
    )
    made.data.normal_()
    return made


def sender(source: KVPool) -> SharedMemorySender:
    assert source.memory_fd is not None
    return SharedMemorySender(source.memory_fd)


def connect(source: KVPool, destination: KVPool, deadline_s: float = 5.0) -> tuple[SendChannel, ReceiveChannel]:
    view = CpuPoolView(destination.layers())
    with ThreadPoolExecutor(1) as decode:
        receiving: list[Future[ReceiveChannel]] = []

        def exchange(offer: bytes) -> bytes:
            answered: Future[bytes] = Future()
            connect_receiver = SharedMemoryReceiver().connect_receiver
            receiving.append(decode.submit(connect_receiver, offer, answered.set_result, view, deadline_s))
            return answered.result(5)

        sending = sender(source).connect_sender(exchange, CpuPoolView(source.layers()), deadline_s)
        return sending, receiving[0].result(5)


@pytest.mark.parametrize("num_source_blocks", [5, 8, 20])
def test_tokens_arrive_and_nothing_else_changes(num_source_blocks: int) -> None:
    """Also from a pool of another size."""
    source, destination = pool(num_source_blocks), pool()
    before = destination.data.clone().flatten(2, 3)
    sending, receiving = connect(source, destination)
    from_slots, to_slots = Slots([SlotRun(12, 6), SlotRun(3, 2)]), Slots([SlotRun(30, 2), SlotRun(0, 3), SlotRun(9, 3)])
    for layers in (range(0, 2), range(2, 3)):
        sending.send(layers, from_slots)
        receiving.receive(layers, to_slots)
    receiving.flush()
    sending.flush()
    after = destination.data.flatten(2, 3)
    before[:, :, to_slots.ids_T] = source.data.flatten(2, 3)[:, :, from_slots.ids_T]
    assert torch.equal(after, before)
    sending.close()
    receiving.close()


def test_the_reader_cannot_write_and_the_memory_cannot_shrink() -> None:
    source, destination = pool(), pool()
    sending, receiving = connect(source, destination)
    mapped = receiving._source.rows  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="read-only"):
        mapped[0, 0, 0, 0] = 1
    assert source.memory_fd is not None
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(source.memory_fd, 4096)
    sending.close()
    receiving.close()


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ([SlotRun(0, 3)], "3 tokens where 4"),
        ([SlotRun(SLOTS - 2, 4)], "outside"),
        ([SlotRun(2**63, 4)], "outside"),
        ([SlotRun(0, 4), SlotRun(5, 0)], "outside"),
    ],
)
def test_places_that_cannot_be_are_refused(runs: list[SlotRun], named: str) -> None:
    source, destination = pool(), pool()
    before = destination.data.clone()
    sending, receiving = connect(source, destination)
    sending.send(range(1), Slots(runs))
    with pytest.raises(TransportError, match=named):
        receiving.receive(range(1), Slots([SlotRun(0, 4)]))
    assert torch.equal(destination.data, before)
    sending.close()
    receiving.close()


def test_a_pool_of_another_layout_is_refused() -> None:
    """The handshake compares layouts; this is what stands behind it."""
    with pytest.raises(TransportError, match="of this layout"):
        connect(pool(num_layers=LAYERS - 1), pool(), deadline_s=0.5)


def test_neither_side_waits_longer_than_its_deadline() -> None:
    sending, receiving = connect(pool(), pool(), deadline_s=0.2)
    slots = Slots([SlotRun(0, 4)])
    with pytest.raises(TransportError, match="gone or stopped"):
        receiving.receive(range(1), slots)
    sending.send(range(1), slots)
    with pytest.raises(TransportError, match="gone or stopped"):
        sending.flush()
    receiving.close()
    with pytest.raises(TransportError, match="gone"):
        sending.flush()
    sending.close()


def test_a_peer_that_is_gone_is_noticed_at_once() -> None:
    sending, receiving = connect(pool(), pool(), deadline_s=60)
    sending.close()
    with pytest.raises(TransportError, match="gone"):
        receiving.receive(range(1), Slots([SlotRun(0, 4)]))
    receiving.close()


def test_strangers_are_refused() -> None:
    """Somebody who knows the name of the socket, but not the key; and a decode worker that nobody listens to."""
    source = pool()

    def stranger(offer: bytes) -> bytes:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(b"\0tandem-kv-" + offer[:32].hex().encode())
        connection.sendall(secrets.token_bytes(32))
        connections.append(connection)
        return b""

    connections: list[socket.socket] = []
    with pytest.raises(TransportError, match="somebody else"):
        sender(source).connect_sender(stranger, CpuPoolView(source.layers()), 1.0)
    assert connections[0].recv(100) == b"", "it learns nothing"
    connections[0].close()
    nobody = Offer(secrets.token_bytes(32), secrets.token_bytes(32), SLOTS, 32, 0, b"")
    for offer, named in ((b"", "an offer of 0 bytes"), (nobody.pack(), "no such prefill worker")):
        with pytest.raises(TransportError, match=named):
            SharedMemoryReceiver().connect_receiver(offer, lambda answer: None, CpuPoolView(source.layers()), 1.0)


def test_memory_is_touched_only_when_written() -> None:
    """A shared pool larger than what a test may use is made at once."""
    huge = KVPool(
        num_layers=8, num_blocks=100_000, block_size=16, num_kv_heads=4, head_dim=64, dtype=torch.float32, shared=True
    )
    assert huge.memory_fd is not None
    assert huge.data.nbytes > 20_000_000_000
    huge.data[3, 1, 77] = 1.0
    assert os.fstat(huge.memory_fd).st_blocks * 512 < 1_000_000

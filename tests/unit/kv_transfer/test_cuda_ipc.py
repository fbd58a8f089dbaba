"""CUDA IPC without CUDA: how decode reads a foreign pool, with memory of this process in place of a mapped handle.

What CUDA itself does is in tests/gpu/test_gpu_transports.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor

from kv_transfer.plan import SlotRun
from kv_transfer.pool_view import PoolView, Slots
from kv_transfer.transport import ReceiveChannel, SendChannel, TransportError
from kv_transfer.transports import cuda_ipc
from kv_transfer.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender

LAYERS, HEADS, HEAD_DIM = 3, 2, 8
HANDLE = b"where the pool is"


def pool(num_slots: int, heads: int = HEADS) -> Tensor:
    return torch.randn(LAYERS, 2, num_slots, heads, HEAD_DIM).to(torch.bfloat16)


def open_here(exported: Tensor) -> Callable[[bytes, torch.device], Tensor]:
    """In place of `open_storage`: the bytes of this tensor."""

    def open_(handle: bytes, device: torch.device) -> Tensor:
        assert (handle, device.type) == (HANDLE, "cpu")
        return torch.empty(0, dtype=torch.uint8).set_(exported.untyped_storage())

    return open_


def connect(source: PoolView, destination: PoolView) -> tuple[SendChannel, ReceiveChannel]:
    with ThreadPoolExecutor(1) as decode:
        receiving: list[Future[ReceiveChannel]] = []

        def exchange(offer: bytes) -> bytes:
            answered: Future[bytes] = Future()
            receiving.append(decode.submit(CudaIpcReceiver().connect_receiver, offer, answered.set_result, destination, 5.0))
            either: list[Future[Any]] = [answered, receiving[0]]
            wait(either, timeout=5, return_when=FIRST_COMPLETED)
            if not answered.done():
                receiving[0].result(0)  # raises
            return answered.result(0)

        sending = CudaIpcSender(HANDLE).connect_sender(exchange, source, 5.0)
        return sending, receiving[0].result(5)


@pytest.mark.parametrize("heads", [range(0, 2), range(1, 2)], ids=["all heads", "one head"])
def test_tokens_arrive_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch, heads: range) -> None:
    """From a pool of another size, and of other heads."""
    source, target = pool(20, HEADS), pool(32, len(heads))
    monkeypatch.setattr(cuda_ipc, "open_storage", open_here(source))
    from_slots, to_slots = Slots([SlotRun(12, 6), SlotRun(3, 2)]), Slots([SlotRun(30, 2), SlotRun(0, 3), SlotRun(9, 3)])
    sending, receiving = connect(PoolView(source.unbind(0), heads), PoolView(target.unbind(0)))
    expected = target.clone()
    for layers in (range(0, 2), range(2, 3)):
        for layer in layers:
            expected[layer, :, to_slots.ids_T] = source[layer, :, from_slots.ids_T, heads.start : heads.stop]
        sending.send(layers, from_slots)
        receiving.receive(layers, to_slots)
        receiving.flush()
        sending.flush()
        assert torch.equal(target, expected)
    sending.close()
    receiving.close()


def test_a_pool_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer_layers, target = pool(8)[:2].clone(), PoolView(pool(8).unbind(0))
    monkeypatch.setattr(cuda_ipc, "open_storage", open_here(fewer_layers))
    with pytest.raises(TransportError, match="not a pool of this layout"):
        connect(PoolView(fewer_layers.unbind(0)), target)
    with pytest.raises(TransportError, match="not of this layout"):
        connect(PoolView(pool(8).unbind(0), range(0, 1)), PoolView(pool(8, 4).unbind(0)))


def test_memory_that_can_not_be_reached_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before decode answers, so that the next transport is tried."""

    def unreachable(handle: bytes, device: torch.device) -> Tensor:
        raise RuntimeError("CUDA error: peer access is not supported between these two devices\nand more")

    monkeypatch.setattr(cuda_ipc, "open_storage", unreachable)
    with pytest.raises(TransportError, match=r"can't be reached from this GPU: CUDA error: peer access .* devices$"):
        connect(PoolView(pool(8).unbind(0)), PoolView(pool(8).unbind(0)))

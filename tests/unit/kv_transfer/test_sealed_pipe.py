"""Sealed KV on its way: nobody reads it, and what was changed, left out, repeated or swapped does not open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kv_transfer.transport import TransportError
from kv_transfer.transports.sealed import KEY_BYTES, SealedPipe, new_key

KEY = bytes(range(KEY_BYTES))
PAYLOADS = [torch.full((size,), value, dtype=torch.uint8) for size, value in ((64, 7), (1000, 8), (64, 7), (1, 9))]


class Wire:
    """Keeps what is sent, and gives it to who receives."""

    def __init__(self, seen: list[Tensor]) -> None:
        self.seen = seen
        self.closed = False

    def send(self, payload: Tensor) -> None:
        self.seen.append(payload.clone())

    def receive(self, into: Tensor) -> None:
        into.copy_(self.seen.pop(0))

    def interrupt(self) -> None:
        self.seen.clear()

    def close(self) -> None:
        self.closed = True


def sent(key: bytes = KEY) -> list[Tensor]:
    wire = Wire([])
    pipe = SealedPipe(wire, key)
    for payload in PAYLOADS:
        pipe.send(payload)
    pipe.close()
    assert wire.closed
    return wire.seen


def test_what_is_sent_arrives_and_is_not_what_is_seen() -> None:
    seen = sent()
    assert all(
        bytes(payload.tolist()[:16]) not in bytes(sealed.tolist()) for payload, sealed in zip(PAYLOADS[:3], seen, strict=False)
    )
    assert not torch.equal(seen[0], seen[2]), "equal payloads look different"
    pipe = SealedPipe(Wire(seen), KEY)
    for payload in PAYLOADS:
        into = torch.zeros_like(payload)
        pipe.receive(into)
        assert torch.equal(into, payload)


def flipped(seen: list[Tensor]) -> list[Tensor]:
    seen[0][5] ^= 1
    return seen


def tag_flipped(seen: list[Tensor]) -> list[Tensor]:
    seen[0][-1] ^= 1
    return seen


ATTACKS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "a flipped bit": flipped,
    "a flipped bit of the tag": tag_flipped,
    "one that is left out": lambda seen: [seen[2], seen[1]],
    "one of another channel": lambda seen: sent(new_key()),
    "unsealed": lambda seen: [torch.zeros(80, dtype=torch.uint8)],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_was_tampered_with_does_not_open(attack: str) -> None:
    pipe = SealedPipe(Wire(ATTACKS[attack](sent())), KEY)
    with pytest.raises(TransportError, match="changed on its way"):
        pipe.receive(torch.zeros_like(PAYLOADS[0]))


def test_a_payload_can_not_be_repeated() -> None:
    seen = sent()
    pipe = SealedPipe(Wire([seen[0], seen[0]]), KEY)
    pipe.receive(torch.zeros_like(PAYLOADS[0]))
    with pytest.raises(TransportError, match="changed on its way"):
        pipe.receive(torch.zeros_like(PAYLOADS[0]))


def test_keys_differ() -> None:
    assert len({new_key() for _ in range(100)}) == 100

"""KV that nobody on the way can read or change: AES-256-GCM around whatever else moves bytes.

The sender makes a key for each channel and sends it with its offer, over the workers' authenticated and encrypted socket. A
channel has one direction and its own key, so the number of a payload is a nonce that no other payload has. A payload that was
changed, left out, repeated or put in another's place does not open.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from kv_transfer.transport import TransportError
from kv_transfer.transports.staged import BytePipe

KEY_BYTES = 32
_TAG_BYTES = 16
_NONCE_BYTES = 12


def new_key() -> bytes:
    """Return the key of a new channel."""
    return secrets.token_bytes(KEY_BYTES)


class SealedPipe:
    """A BytePipe that seals what another one carries. For buffers in the processor's memory."""

    def __init__(self, pipe: BytePipe, key: bytes) -> None:
        self._pipe = pipe
        self._cipher = AESGCM(key)
        self._num_payloads = 0
        self._buffer = torch.zeros(0, dtype=torch.uint8)

    def send(self, payload: Tensor) -> None:
        sealed = self._sealed(payload)
        self._cipher.encrypt_into(self._next_nonce(), _bytes_of(payload), None, _bytes_of(sealed))
        self._pipe.send(sealed)

    def receive(self, into: Tensor) -> None:
        sealed = self._sealed(into)
        self._pipe.receive(sealed)
        try:
            self._cipher.decrypt_into(self._next_nonce(), _bytes_of(sealed), None, _bytes_of(into))
        except InvalidTag:
            raise TransportError("KV was changed on its way: it does not open with the channel's key") from None

    def interrupt(self) -> None:
        self._pipe.interrupt()

    def close(self) -> None:
        self._pipe.close()

    def _sealed(self, payload: Tensor) -> Tensor:
        """A buffer for the sealed payload, which lives as long as the pipe: fresh pages cost more than the cipher."""
        size = payload.numel() + _TAG_BYTES
        if self._buffer.numel() < size:
            self._buffer = torch.zeros(size, dtype=torch.uint8)
        return self._buffer[:size]

    def _next_nonce(self) -> bytes:
        self._num_payloads += 1
        return self._num_payloads.to_bytes(_NONCE_BYTES, "big")


def _bytes_of(tensor: Tensor) -> memoryview[Any]:
    array: Any = tensor.numpy()  # numpy's stubs don't say that its arrays are buffers
    return memoryview(array)

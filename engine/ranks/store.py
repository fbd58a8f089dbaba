"""The store by which the ranks of a process group find each other, without a server of its own.

torch's TCPStore listens on every interface and asks nobody who they are. A group needs little from it: each rank sets a
value or two, its address or NCCL's id, and waits for the others'. So values travel in our own authenticated messages:
`publish` takes what this rank has set to the others, `deliver` brings theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_Store: Any = dist.Store  # type: ignore[attr-defined]


class RelayStore(_Store):  # type: ignore[misc]  # the base is Any, see above
    """A key-value store without a server: the part of `torch.distributed.Store` that gloo and NCCL use to connect.

    `publish` sends a key and its value to the other ranks. A read waits up to `deadline_s` seconds. Any thread may call it.
    """

    def __init__(self, publish: Callable[[str, bytes], object], deadline_s: float) -> None:
        super().__init__()
        self._publish = publish
        self._deadline_s = deadline_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def deliver(self, key: str, value: bytes) -> None:
        """Store a value that another rank has set, and wake whoever waits for it."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """Store a value and publish it to the other ranks."""
        self.deliver(key, bytes(value))
        self._publish(key, bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once some rank has set it. Raises TimeoutError after the store's deadline."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all these keys are set. Raises TimeoutError after the store's deadline; `timeout` is not used."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), self._deadline_s):
                raise TimeoutError("another rank's address did not arrive")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys are set, without waiting. NCCL's watchdog asks."""
        with self._changed:
            return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        """Always False: torch then uses `set`, `get` and `wait` alone."""
        return False

"""What pools order from the outside world. Each order names one life of one worker; its answers are methods of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages.workers import Duty


@dataclass(frozen=True)
class Start:
    """Begin this life after `delay_s` seconds. Answer: `started` or `lost`."""

    worker_id: str
    epoch: int
    delay_s: float


@dataclass(frozen=True)
class Drain:
    """Let this worker finish what it has. Answer: `drained`, also when the deadline for it has passed."""

    worker_id: str
    epoch: int


@dataclass(frozen=True)
class Stop:
    """End this life; the worker keeps what it occupies. Answer: `lost`."""

    worker_id: str
    epoch: int


@dataclass(frozen=True)
class Remove:
    """End this life, whatever its state, and give back what it occupies. No answer."""

    worker_id: str
    epoch: int


@dataclass(frozen=True)
class Resume:
    """This life is up, as a former supervisor has left it. Answer: `resumed` or `lost`."""

    worker_id: str
    epoch: int


@dataclass(frozen=True)
class TakeRole:
    """Tell this life, which is up, what it is asked for from now on. No answer."""

    worker_id: str
    epoch: int
    duty: Duty


Action = Start | Drain | Stop | Remove | Resume | TakeRole

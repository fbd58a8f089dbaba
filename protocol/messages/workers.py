"""What workers are called, and what a worker promises or must have in common with another: parts of many messages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import NamedTuple


class Role(Enum):
    """What routers ask of a worker: to compute prompts, or to make tokens."""

    PREFILL = "prefill"
    DECODE = "decode"


class Duty(Enum):
    """What a worker is asked for: the work of one role, or of both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def role(self) -> Role:
        """The role that the worker counts as where workers are counted: one that does both is a decode worker."""
        return Role.PREFILL if self is Duty.PREFILL else Role.DECODE

    def does(self, role: Role) -> bool:
        """Whether the work of this role is part of it."""
        return self is Duty.BOTH or self.role is role

    @property
    def in_words(self) -> str:
        """What a worker is that has it."""
        return "a worker of both roles" if self is Duty.BOTH else f"a {self.value} worker"


class WorkerLife(NamedTuple):
    """Names one life of one worker: every start of a worker has a higher epoch than the one before."""

    worker_id: str
    epoch: int


VARIES = " (varies)"
"""How the name of an arithmetic ends by which a token's bits depend on what is computed beside it."""


@dataclass(frozen=True)
class WorkerRef:
    """One life of one worker: a message or transfer that names another epoch belongs to a former life and is refused."""

    worker_id: str
    epoch: int
    address: str
    """Where its socket listens, as `tcp://host:port`."""
    num_ranks: int = 1
    """Number of the worker's tensor-parallel ranks. The first rank speaks for all."""
    arithmetic: str = ""
    """The name of the arithmetic by which it computes (`engine.arithmetic`). It ends with `VARIES` where a token's bits depend
    on what is computed beside it. No part of the layout: workers of different arithmetics hand over KV to each other."""
    weights: str = ""
    """Which weights it has: the first digits of `ModelFacts.identity`."""

    @property
    def computation(self) -> str:
        """The name of what it computes: weights and arithmetic.

        Workers of one name give a token the same KV and logits from the same tokens before it. It ends with `VARIES` if the
        arithmetic does.
        """
        return f"{self.weights} {self.arithmetic}" if self.weights else self.arithmetic

    @property
    def life(self) -> WorkerLife:
        """Worker id and epoch, without the address."""
        return WorkerLife(self.worker_id, self.epoch)


@dataclass(frozen=True)
class Ticket:
    """A decode worker's promise of blocks, given to the router, passed on to prefill."""

    ticket_id: int
    transfer_id: int
    """Identity of the one transfer that may fill it; never derived from the client's request id."""
    worker: WorkerRef
    block_size: int
    block_table: tuple[int, ...]
    num_prompt_tokens: int
    held_tokens: int
    """Tokens at the prompt's beginning whose KV the decode worker has already, in whole blocks. Nothing is sent for them."""
    unseen_tokens: int = 0
    """Tokens at the prompt's beginning that lie before the sliding windows of the first generated token. Nothing is sent for
    them either."""

    @property
    def sent_from(self) -> int:
        """Position of the first token whose KV is sent."""
        return max(self.held_tokens, self.unseen_tokens)


@dataclass(frozen=True)
class KvLayout:
    """What must be equal on both sides of a handoff."""

    model_hash: str
    """Identity of the model, `ModelFacts.identity`."""
    dtype: str
    """The type that is computed in, which decides the bits of KV in every format."""
    kv_cache_dtype: str
    """Format of K and V in the pool; `auto` is the type that they are computed in."""
    num_layers: int
    num_kv_heads: int
    """Number of KV heads of the whole model, however many ranks share them."""
    head_dim: int
    layout_version: int
    memory: str
    """The kind of device in whose memory the pool lies, such as cpu or cuda: by it go fingerprints and transports."""
    positions: str = ""
    """What rotary positions are, where the model's files alone do not say it: `ModelFacts.positions`."""

    def differences(self, other: KvLayout) -> list[str]:
        """Sentences such as `dtype: float32 here, bfloat16 there`; empty if the two fit."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return [f"{name}: {mine} here, {theirs} there" for name, mine, theirs in pairs if mine != theirs]

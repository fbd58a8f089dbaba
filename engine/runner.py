"""What workers ask of the engine of one rank: `engine.model_runner` computes, `engine.paced.runner` does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from configs.facts import ModelFacts
from engine.batch import Chunk, SampledToken
from engine.memory.kv_pool import KVPool
from protocol.messages.workers import KvLayout


class Runner(Protocol):
    """One rank's engine with its KV pool. Used from one thread."""

    @property
    def facts(self) -> ModelFacts:
        """Facts of the whole model, not of one rank's share."""

    @property
    def pool(self) -> KVPool:
        """The KV of this rank's heads."""

    @property
    def arithmetic(self) -> str:
        """Its name (`engine.arithmetic`): what this rank computes has the bits of any other rank of this name."""

    def layout(self) -> KvLayout:
        """What another worker's KV must look like to fit into this one's pool."""

    def execute(self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None) -> list[SampledToken | None]:
        """Compute the chunks' tokens, write their KV, and sample after each chunk that asks for it.

        Returns one entry per chunk, in order; None where nothing was to be sampled. `on_layer(i)` is called from this
        thread once layer i's KV of all chunks is in the pool.
        """


class Engine(Protocol):
    """Runs a worker's steps, one at a time, and keeps account of them: `engine.engine_thread`, or `engine.paced.engine`."""

    steps: int
    """Number of steps since the start."""
    busy_s: float
    """Seconds that all steps since the start took together."""

    def start(
        self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None
    ) -> asyncio.Future[list[SampledToken | None]]:
        """Begin a step; the future is its result. The caller awaits it before the next one."""

    @property
    def step_age_s(self) -> float:
        """How long the current step has been running; 0 when idle."""

    def renice(self, niceness: int) -> None:
        """Compute in a thread of another niceness from the next step on. Not while a step runs."""

    def close(self) -> None:
        """Begin no further step. A step that runs is finished."""

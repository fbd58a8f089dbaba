"""What workers ask of the engine of one rank: `engine.model_runner` computes, `engine.paced.runner` keeps a clock's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from configs.facts import ModelFacts
from engine.batch import Chunk, SampledToken
from engine.memory.kv_pool import KVPool
from protocol.messages import KvLayout


class Runner(Protocol):
    """One rank's engine with its KV pool. Used from one thread."""

    @property
    def facts(self) -> ModelFacts:
        """Of the whole model."""

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

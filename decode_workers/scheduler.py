"""Which streams the next decode step computes. Pure Python.

A stream joins at the back of the queue and leaves whenever it ends; the batch of every step is the oldest
`max_batch_size` streams. Each has all the blocks it can need, so none is ever in another's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from engine.batch import Chunk
from protocol.messages import SamplingParams


@dataclass
class Stream:
    """One attached ticket in the batch."""

    ticket_id: int
    owner: bytes
    block_table: Sequence[int]
    sampling: SamplingParams
    num_tokens: int
    """Prompt and answer so far, the newest token included."""
    num_generated: int
    newest_token: int
    """Sampled last; its KV is computed by the next step."""

    def chunk(self) -> Chunk:
        return Chunk((self.newest_token,), self.num_tokens - 1, self.block_table, self.sampling, self.num_generated)

    def append(self, token_id: int) -> None:
        self.newest_token = token_id
        self.num_tokens += 1
        self.num_generated += 1


class DecodeScheduler:
    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._streams: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, ticket_id: int) -> bool:
        return ticket_id in self._streams

    def add(self, stream: Stream) -> None:
        assert stream.ticket_id not in self._streams, "a ticket is attached once"
        self._streams[stream.ticket_id] = stream

    def remove(self, ticket_id: int) -> None:
        """Idempotent."""
        self._streams.pop(ticket_id, None)

    def plan(self) -> list[Stream]:
        """The next batch, oldest first; empty when there is nothing to do."""
        return list(islice(self._streams.values(), self._max_batch_size))

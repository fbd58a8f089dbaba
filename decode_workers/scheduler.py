"""Which tokens the next decode step computes. Pure Python.

    add ──► RUNNING ──no block is free──► PREEMPTED ──blocks are free again──► RECOMPUTING ──last chunk──► RUNNING ──► remove

RUNNING       holds blocks for all its tokens; each step computes its newest token and samples the next
PREEMPTED     holds none, and waits; its tokens are kept, and its KV as long as nobody else needs the blocks
RECOMPUTING   holds blocks for all its tokens again; each step computes a chunk of what is lost and samples nothing

Streams are served in the order in which they were attached, and keep their place while they wait. The batch of a step is the
oldest `max_batch_size` streams that hold blocks. A running stream gets a further block just before the step that needs it. If
none is free, the youngest stream gives back all of its own, which may be the one that asks. The oldest is never preempted: if
every other block belongs to tickets that are not attached yet, it waits for these, which come or go within their leases.

Preempted streams come back oldest first, one at a time, as soon as their blocks and one more for each other ticket are free;
meanwhile the ledger takes no new tickets. At most one chunk is recomputed in a step, so running streams go on beside it.

What was emitted is never sampled again: a stream goes on at the position after its newest token. Chunks are cut where prefill
cuts them, so that sums over the prompt are rounded in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decode_workers.ledger import Ledger
from engine.batch import Chunk
from protocol.sampling import SamplingParams


@dataclass(eq=False)
class Stream:
    """One attached ticket."""

    ticket_id: int
    owner: bytes
    block_table: Sequence[int]
    """The ledger's own list: empty while preempted."""
    sampling: SamplingParams
    token_ids: list[int]
    """Prompt and answer so far. The newest was sampled last; its KV is computed by the next step."""
    num_generated: int
    computed: int
    """Tokens whose KV is in the pool: all but the newest, or fewer after a preemption."""

    @property
    def preempted(self) -> bool:
        return not self.block_table

    @property
    def recomputing(self) -> bool:
        return not self.preempted and self.computed < len(self.token_ids) - 1

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.num_generated += 1


class DecodeScheduler:
    """`max_chunk_tokens` is where prefill cuts prompts."""

    def __init__(self, ledger: Ledger, max_batch_size: int, max_chunk_tokens: int) -> None:
        self._ledger = ledger
        self._max_batch_size = max_batch_size
        self._max_chunk_tokens = max_chunk_tokens
        self._streams: dict[int, Stream] = {}
        """Oldest first."""
        self.preemptions = 0
        self.recomputed_tokens = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, ticket_id: int) -> bool:
        return ticket_id in self._streams

    @property
    def num_preempted(self) -> int:
        return sum(stream.preempted for stream in self._streams.values())

    def add(self, stream: Stream) -> None:
        assert stream.ticket_id not in self._streams, "a ticket is attached once"
        self._streams[stream.ticket_id] = stream

    def remove(self, ticket_id: int) -> None:
        """Idempotent. Its blocks are given back by the ledger."""
        self._streams.pop(ticket_id, None)

    def plan(self) -> list[Stream]:
        """The next batch; empty when there is nothing to do until blocks come back. Only between two steps."""
        batch: list[Stream] = []
        for stream in self._streams.values():
            if len(batch) == self._max_batch_size:
                return batch
            if not stream.preempted and self._has_room(stream):
                batch.append(stream)
        returning = self._readmit()
        return batch if returning is None else [*batch, returning]

    def chunk(self, stream: Stream) -> Chunk:
        """What the next step computes of a planned stream."""
        start = stream.computed
        if not stream.recomputing:
            newest = (stream.token_ids[-1],)
            return Chunk(newest, start, stream.block_table, stream.sampling, stream.num_generated, stream.token_ids)
        cut = (start // self._max_chunk_tokens + 1) * self._max_chunk_tokens
        token_ids = stream.token_ids[start : min(cut, len(stream.token_ids) - 1)]
        return Chunk(token_ids, start, stream.block_table, None, stream.num_generated)

    def computed(self, stream: Stream, chunk: Chunk) -> None:
        """The KV of this chunk is in the pool."""
        stream.computed = chunk.end
        if chunk.sampling is None:
            self.recomputed_tokens += len(chunk.token_ids)

    def _has_room(self, stream: Stream) -> bool:
        """Whether the stream has a slot for its newest token, after younger ones had to make room if need be."""
        while not self._ledger.grow(stream.ticket_id, len(stream.token_ids)):
            youngest = next(self._holders(youngest_first=True))
            if youngest is not next(self._holders()):
                self._preempt(youngest)
            if youngest is stream:
                return False
        return True

    def _preempt(self, stream: Stream) -> None:
        self._ledger.keep(stream.ticket_id, stream.token_ids[: stream.computed])
        self._ledger.preempt(stream.ticket_id)
        self.preemptions += 1

    def _readmit(self) -> Stream | None:
        """Give the oldest preempted stream its blocks back, if there are enough and no other is being recomputed."""
        preempted = next((stream for stream in self._streams.values() if stream.preempted), None)
        if preempted is None or any(stream.recomputing for stream in self._streams.values()):
            return None
        cached = self._ledger.readmit(preempted.ticket_id, len(preempted.token_ids))
        if cached is None:
            return None
        preempted.computed = cached
        return preempted

    def _holders(self, youngest_first: bool = False) -> Iterator[Stream]:
        streams = self._streams.values()
        return (stream for stream in (reversed(streams) if youngest_first else streams) if not stream.preempted)

"""Which tokens the next decode step computes. Pure Python.

    add ──► RUNNING ──no block is free──► PREEMPTED ──blocks are free again──► RECOMPUTING ──last chunk──► RUNNING ──► remove
     └────► PREFILLING ──last chunk──► RUNNING

RUNNING       holds blocks for all its tokens; each step computes its newest token and samples the next
PREFILLING    its prompt is computed here, chunk by chunk; the last chunk samples the first token. It may be preempted too
PREEMPTED     holds none, and waits; its tokens are kept, and its KV as long as nobody else needs the blocks
RECOMPUTING   holds blocks for all its tokens again; each step computes a chunk of what is lost, and the last one samples

Streams are served in the order in which they were attached, and keep their place while they wait. The batch of a step is the
oldest `max_batch_size` streams that hold blocks. A running stream gets a further block just before the step that needs it. If
none is free, the youngest stream gives back all of its own, which may be the one that asks. The oldest is never preempted: if
every other block belongs to tickets that are not attached yet, it waits for these, which come or go within their leases. A
stream that migrates gives nothing back while its blocks are sent; who needs some of them waits until it has gone, or stays.

Preempted streams come back oldest first, one at a time, as soon as their blocks and one more for each other ticket are free;
meanwhile the ledger takes no new tickets.

Beside the newest tokens of running streams a step computes up to `max_chunk_tokens` tokens of those that are prefilled or
recomputed, oldest first: short prompts share a step, a long one is cut into chunks, at multiples of that number whatever
else is there: where the cuts are decides how sums are rounded. What was emitted is never sampled again: a stream goes on at
the position after its newest token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decode_workers.ledger import Ledger
from engine.batch import Chunk
from engine.grammar import Constraint
from engine.scoring import PromptScores
from protocol.sampling import SamplingParams


@dataclass(eq=False)
class LocalPrefill:
    """What the router is told with the first token about a prompt that was computed here."""

    cached_tokens: int
    scores: PromptScores | None
    """Collects the logprobs of the prompt, if they are wanted."""
    began: float | None = None
    """Time on `time.monotonic` at which the prompt's first chunk began."""


@dataclass(eq=False)
class Stream:
    """One attached ticket in the batch, or waiting preempted for its turn."""

    ticket_id: int
    owner: bytes
    block_table: Sequence[int]
    """The ledger's own list: empty while preempted."""
    sampling: SamplingParams
    token_ids: list[int]
    """Prompt and answer so far. When the stream runs, the next step computes the KV of the newest token."""
    num_generated: int
    computed: int
    """Number of leading tokens whose KV is in the pool: all but the newest when the stream runs."""
    constraint: Constraint | None = None
    """The grammar to be followed, if any, in its state after the newest token."""
    prefill: LocalPrefill | None = None
    """Set until the first token, if the prompt is computed here."""
    known: int = 0
    """Number of tokens whose KV has ever been in the pool. Computing these again is counted as recomputing."""
    pinned: bool = False
    """Whether its blocks are being sent to another worker. Such a stream is not preempted."""
    paused: bool = False
    """Whether the last of its blocks are being sent. Such a stream is not computed."""

    def __post_init__(self) -> None:
        self.known = max(self.known, self.computed)

    @property
    def preempted(self) -> bool:
        """Whether the stream has lost its blocks and waits for new ones."""
        return not self.block_table

    @property
    def recomputing(self) -> bool:
        """Whether KV that was in the pool before is being computed again."""
        return not self.preempted and self.computed < self.known

    @property
    def remaining(self) -> int:
        """Number of tokens to compute before the next one is sampled."""
        return len(self.token_ids) - self.computed

    @property
    def complete(self) -> bool:
        """Whether the stream runs: the KV of all its tokens but the newest is in the pool."""
        return not self.preempted and self.prefill is None and self.remaining == 1

    def append(self, token_id: int) -> None:
        """Add a token that was sampled."""
        self.token_ids.append(token_id)
        self.num_generated += 1


class DecodeScheduler:
    """Decides which streams each step computes, and which are preempted when blocks run out."""

    def __init__(self, ledger: Ledger, max_batch_size: int, max_chunk_tokens: int) -> None:
        self._ledger = ledger
        self._max_batch_size = max_batch_size
        self._max_chunk_tokens = max_chunk_tokens
        self._streams: dict[int, Stream] = {}
        """Oldest first."""
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.prefilled_tokens = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, ticket_id: int) -> bool:
        return ticket_id in self._streams

    @property
    def num_preempted(self) -> int:
        """Number of streams that wait for blocks."""
        return sum(stream.preempted for stream in self._streams.values())

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens that are to be computed here and are not yet."""
        return sum(stream.remaining for stream in self._streams.values() if stream.prefill is not None)

    def add(self, stream: Stream) -> None:
        """Take a stream whose ticket is attached."""
        assert stream.ticket_id not in self._streams, "a ticket is attached once"
        self._streams[stream.ticket_id] = stream

    def find(self, ticket_id: int) -> Stream | None:
        """The stream of this ticket. None if there is none."""
        return self._streams.get(ticket_id)

    def remove(self, ticket_id: int) -> None:
        """Drop the ticket's stream; the ledger gives its blocks back. Idempotent."""
        self._streams.pop(ticket_id, None)

    def plan(self) -> list[Stream]:
        """The streams of the next step. Empty when nothing can be computed until blocks come back. Called between two steps."""
        batch: list[Stream] = []
        room = self._max_chunk_tokens
        for stream in self._streams.values():
            if len(batch) == self._max_batch_size:
                return batch
            if stream.preempted or stream.paused:
                continue
            end = self._chunk_end(stream)
            num_tokens = end - stream.computed if stream.remaining > 1 else 0
            if num_tokens <= room:
                if self._has_room(stream):
                    room -= num_tokens
                    batch.append(stream)
            else:
                room = 0  # no younger prompt goes before it
        if len(batch) == self._max_batch_size:
            return batch
        returning = self._readmit()
        if returning is not None and self._chunk_end(returning) - returning.computed <= room:
            batch.append(returning)
        return batch

    def chunk(self, stream: Stream) -> Chunk:
        """The tokens of a planned stream that the next step computes."""
        start, end = stream.computed, self._chunk_end(stream)
        last = end == len(stream.token_ids)
        return Chunk(
            token_ids=stream.token_ids[start:end],
            start=start,
            block_table=stream.block_table,
            sampling=stream.sampling if last else None,
            num_generated=stream.num_generated,
            history=stream.token_ids if last else (),
            scores=None if stream.prefill is None else stream.prefill.scores,
            constraint=stream.constraint if last else None,
        )

    def computed(self, stream: Stream, chunk: Chunk) -> None:
        """Record that this chunk's KV is in the pool. The full blocks of a prompt can be shared from now on."""
        again = max(0, min(chunk.end, stream.known) - chunk.start)
        self.recomputed_tokens += again
        stream.computed = chunk.end
        stream.known = max(stream.known, chunk.end)
        if stream.prefill is not None:
            self.prefilled_tokens += len(chunk.token_ids) - again
            self._ledger.keep(stream.ticket_id, stream.token_ids[: chunk.end])

    def _chunk_end(self, stream: Stream) -> int:
        cut = (stream.computed // self._max_chunk_tokens + 1) * self._max_chunk_tokens
        return min(cut, len(stream.token_ids))

    def _has_room(self, stream: Stream) -> bool:
        """Whether the stream has a slot for its newest token, after younger ones had to make room if need be."""
        while not self._ledger.grow(stream.ticket_id, len(stream.token_ids)):
            victim = self._victim(stream)
            if victim is not None and victim is not next(self._holders()):
                self._preempt(victim)
            if victim is None or victim is stream:
                return False
        return True

    def _victim(self, asking: Stream) -> Stream | None:
        """The youngest that may give way: none that is older than the asking one, or pinned."""
        for stream in self._holders(youngest_first=True):
            if not stream.pinned:
                return stream
            if stream is asking:
                break
        return None

    def _preempt(self, stream: Stream) -> None:
        self._ledger.keep(stream.ticket_id, stream.token_ids[: stream.computed])
        self._ledger.preempt(stream.ticket_id)
        self.preemptions += 1

    def _readmit(self) -> Stream | None:
        """Give the oldest preempted stream its blocks back, if there are enough and no other is being recomputed."""
        preempted = next((stream for stream in self._streams.values() if stream.preempted), None)
        if preempted is None or any(stream.recomputing for stream in self._streams.values()):
            return None
        cached = self._ledger.readmit(preempted.ticket_id, len(preempted.token_ids), preempted.known)
        if cached is None:
            return None
        preempted.computed = cached
        return preempted

    def _holders(self, youngest_first: bool = False) -> Iterator[Stream]:
        streams = self._streams.values()
        return (stream for stream in (reversed(streams) if youngest_first else streams) if not stream.preempted)

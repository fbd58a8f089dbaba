"""Which tokens the next decode step computes. Pure Python.

    add ──► RUNNING ──no block is free──► PREEMPTED ──blocks are free again──► RECOMPUTING ──last chunk──► RUNNING ──► remove
     └────► PREFILLING ──last chunk──► RUNNING

    RUNNING       holds blocks for all its tokens that are seen; each step computes its newest token and samples the next
    PREFILLING    its prompt is computed here, chunk by chunk; the last chunk samples the first token. It may be preempted too
    PREEMPTED     holds none, and waits; its tokens are kept, and its KV as long as nobody else needs the blocks
    RECOMPUTING   holds blocks again; each step computes a chunk of what is lost, and the last one samples

Streams are served in the order in which they were attached, and keep their place while they wait. When more streams hold
blocks than a step has rows (`max_batch_size`), `decode_workers.rules.turns` decides who has a row.

A running stream gets a further block just before the step that needs it. If none is free, another stream gives back all of its
own, which may be the one that asks; `decode_workers.room` finds it. The oldest does not give way to growth: if every other
block belongs to tickets that are not attached yet, it waits for these, for as long as their prompts take. A stream that
migrates gives nothing back while its blocks are sent; who needs some of them waits until it has gone, or stays. Preempted
streams come back one at a time.

Beside the newest tokens of running streams, a step computes up to `max_chunk_tokens` tokens of streams that are prefilled or
recomputed, oldest first. Short prompts share a step. A long one is cut into chunks at multiples of that number, whatever else
is there, because where the cuts are decides how sums are rounded. After a chunk of a prompt that has more than eight, shorter
prompts have a step, if there are any (`configs.arithmetic.goes_between`). So a prompt of one step waits for two chunks of a
long one, and for one more for each step of those before it. A scored prompt for whose logits a step has too little memory lets
others pass that are not scored. What was emitted is never sampled again: a stream goes on at the position after its newest
token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from configs.arithmetic import goes_between, turn_between
from configs.schema import SAMPLED_TOKENS
from decode_workers.attached_tickets import AttachedTickets
from decode_workers.ledger import Ledger
from decode_workers.room import Room
from decode_workers.rules.turns import SLICE_STEPS, Turns, turn_wait_s
from decode_workers.stream import Stream
from engine.batch import Chunk
from protocol.share import Share

_FADING = 0.1
"""Weight of the latest step in what a step takes."""


class DecodeScheduler:
    """Decides which streams each step computes, and which are preempted when blocks run out."""

    def __init__(
        self, ledger: Ledger, max_batch_size: int, max_chunk_tokens: int, turn_s: float, clock: Callable[[], float]
    ) -> None:
        """A stream waits for its turn, or for its blocks, about `turn_s` seconds at most, on the `clock`."""
        self._ledger = ledger
        self._max_batch_size = max_batch_size
        self._max_chunk_tokens = max_chunk_tokens
        self._streams: dict[int, Stream] = {}
        """Oldest first."""
        self._turns = Turns()
        self._order: list[Stream] | None = None
        """Who goes first in this slice. None: the next step begins a new one."""
        self._slice_ends = 0
        """Number of the first step of the next slice."""
        self._long: Stream | None = None
        """The stream of which the latest step computed a chunk that was not its last. None if that was for shorter ones."""
        self._crowded = False
        """More streams hold blocks than a step has rows."""
        self._num_steps = 0
        self._step_s = 0.0
        """How long a step takes, in seconds: a mean that fades."""
        self.attached = AttachedTickets(ledger)
        self.room = Room(ledger, self.attached, self._streams, max_batch_size, max_chunk_tokens, turn_s, clock)
        self.recomputed_tokens = 0
        self.prefilled_tokens = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, ticket_id: int) -> bool:
        return ticket_id in self._streams

    @property
    def num_preempted(self) -> int:
        """Number of streams that wait for blocks."""
        return self.room.num_preempted

    @property
    def preemptions(self) -> int:
        """Number of streams that had to give their blocks back since the start."""
        return self.room.preemptions

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens that are to be computed here and are not yet."""
        return sum(stream.remaining for stream in self._streams.values() if stream.prefill is not None)

    @property
    def steps_alike(self) -> int | None:
        """Number of steps, the planned one included, after which others get the seats. None if every stream has one."""
        return self._slice_ends - self._num_steps if self._crowded else None

    def add(self, stream: Stream) -> None:
        """Take a stream whose ticket is attached."""
        assert stream.ticket_id not in self._streams, "a ticket is attached once"
        self._streams[stream.ticket_id] = stream
        self._order = None

    @property
    def streams(self) -> Collection[Stream]:
        """All streams, the oldest first."""
        return self._streams.values()

    def find(self, ticket_id: int) -> Stream | None:
        """The stream of this ticket. None if there is none."""
        return self._streams.get(ticket_id)

    def remove(self, ticket_id: int) -> None:
        """Drop the ticket's stream; the ledger gives its blocks back. Idempotent."""
        stream = self._streams.pop(ticket_id, None)
        if stream is not None:
            self._turns.leave(stream.turn)
            self._order = None
            if stream.drafts is not None:
                stream.drafts.release()
        self.room.remove(ticket_id)

    def plan(self) -> list[Stream]:
        """The streams of the next step. Empty when nothing can be computed until blocks come back. Called between two steps."""
        self._num_steps += 1
        preemptions = self.preemptions
        if self.room.waits and (self.room.settle(self._num_steps) is not None or self.preemptions != preemptions):
            self._order = None
        batch: list[Stream] = []
        tokens_left, rows_left, preemptions = self._max_chunk_tokens, SAMPLED_TOKENS, self.preemptions
        shorter, self._long = self._shorter_than(self._long), None
        for stream in shorter + [each for each in self._in_order() if each not in shorter] if shorter else self._in_order():
            if len(batch) == self._max_batch_size:
                break
            if stream.preempted or stream.paused:
                continue
            end = self._chunk_end(stream)
            num_tokens = end - stream.computed if stream.remaining > 1 else 0
            rows = num_tokens if stream.scored else 0  # beside the one that every stream may have
            if num_tokens > tokens_left:
                tokens_left = 0  # no later prompt goes before it
            elif rows > rows_left:
                rows_left = 0  # no later scored prompt goes before it
            elif self.room.has_slots(stream, end):
                tokens_left, rows_left = tokens_left - num_tokens, rows_left - rows
                batch.append(stream)
                if not shorter and num_tokens and end < len(stream.token_ids):
                    self._long = stream
        if self.preemptions == preemptions:
            return batch
        self._order = None
        return [stream for stream in batch if not stream.preempted]

    def repeated(self, num_steps: int) -> None:
        """Note that so many steps were computed as the last one was planned, without a plan of their own."""
        self._num_steps += num_steps

    def took(self, step_s: float) -> None:
        """Note how long a step took, in seconds."""
        self._step_s = step_s if not self._step_s else (1 - _FADING) * self._step_s + _FADING * step_s

    def wait_s(self, share: Share) -> float:
        """Longest time in seconds that a new stream of this tenant, or one that it has, waits for a turn or for its blocks."""
        wait_s = self.room.wait_s(share, self._step_s)
        if len(self._ledger) < self._max_batch_size:
            return wait_s
        shares = [entry.share for entry in self._ledger]
        turn_s = turn_wait_s(1 + shares.count(share), share, set(shares), self._max_batch_size, self._step_s)
        return max(wait_s, turn_s)

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
            start = chunk.start if chunk.end < len(stream.token_ids) else 0  # at its end what was evicted meanwhile, too
            self.attached.keep(stream.ticket_id, stream.token_ids, chunk.end, start)

    def _chunk_end(self, stream: Stream) -> int:
        most = min(self._max_chunk_tokens, SAMPLED_TOKENS) if stream.scored else self._max_chunk_tokens
        return min((stream.computed // most + 1) * most, len(stream.token_ids))

    def _shorter_than(self, long: Stream | None) -> list[Stream]:
        """The streams that go before this one in the next step (`turn_between`). Those that run are none of them."""
        if long is None:
            return []
        shorter = [
            stream
            for stream in self._streams.values()
            if stream.remaining > 1
            and not (stream.preempted or stream.paused)
            and goes_between(stream.remaining, len(long.token_ids), self._max_chunk_tokens, left=long.remaining)
        ]
        return sorted(shorter, key=lambda stream: turn_between(stream.remaining, self._max_chunk_tokens))

    def _in_order(self) -> Collection[Stream]:
        """All streams, those with a seat first. While a step holds all that have blocks, they are in order of age."""
        if len(self._streams) - self.num_preempted <= self._max_batch_size:
            if self._crowded:
                self._crowded = False
                self._turns.clear()
                for stream in self._streams.values():
                    stream.seated = True
            return self._streams.values()
        if self._order is None or not self._crowded or self._num_steps >= self._slice_ends:
            self._order = self._give_seats()
            self._slice_ends = self._num_steps + SLICE_STEPS
            self._crowded = True
        return self._order

    def _give_seats(self) -> list[Stream]:
        """The streams that hold blocks, those with a seat first.

        Before all others go those that have no token to add yet: what is computed again, and then prompts. They are few, as
        routers send no more prompt tokens than a step computes.
        """
        holders = [stream for stream in self._streams.values() if not stream.preempted]
        first = [stream for stream in holders if stream.recomputing] + [stream for stream in holders if stream.prefilling]
        turns = [stream.turn for stream in holders if not stream.recomputing and not stream.prefilling]
        order = self._turns.order(turns, max(1, self._max_batch_size - len(first)))
        found = first + [self._streams[turn.ticket_id] for turn in order]
        for place, stream in enumerate(found):
            stream.seated = place < self._max_batch_size
        return found

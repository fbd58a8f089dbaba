"""Whatever comes, goes and runs out of blocks, every stream says what it would have said alone, and none waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from configs.schema import SAMPLED_TOKENS
from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler
from decode_workers.stream import LocalPrefill, Stream
from decode_workers.ticket_entry import TicketEntry
from engine.batch import Chunk
from engine.memory.prefix_cache import PrefixCache
from engine.scoring import PromptScores
from protocol.cache.keys import block_keys
from protocol.sampling import SamplingParams
from protocol.share import Share
from protocol.ticket import TicketState

BLOCK_SIZE = 4
NUM_BLOCKS = 12
MAX_BATCH_SIZE = 4
CUT = 6
"""No multiple of the block size, so that chunks end inside of blocks."""
LEASE_S = 10.0
TURN_S = 15.0
ROUTERS = [b"router-1", b"router-2"]
SHARES = [Share(b"one", 1.0), Share(b"two", 4.0)]


def say(context: list[int], seed: int) -> int:
    """The model: what follows depends on every token before it."""
    return hash((tuple(context), seed)) % 1000


class Engine:
    """A paged KV cache in which each slot remembers the token it was written for, and what came before that."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, int]] = {}

    def write(self, block_table: Sequence[int], token_ids: list[int], start: int) -> None:
        for position in range(start, len(token_ids)):
            before = hash(tuple(token_ids[:position]))
            self.slots[block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = token_ids[position], before

    def read(self, block_table: list[int], num_tokens: int) -> list[int]:
        context: list[int] = []
        for position in range(num_tokens):
            token_id, before = self.slots[block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE]
            assert before == hash(tuple(context)), "somebody else wrote into this context"
            context.append(token_id)
        return context

    def compute(self, chunk: Chunk) -> int | None:
        table = list(chunk.block_table)
        self.write(table, self.read(table, chunk.start) + list(chunk.token_ids), chunk.start)
        return None if chunk.sampling is None else say(self.read(table, chunk.end), chunk.sampling.seed)


@dataclass
class Request:
    entry: TicketEntry
    sampling: SamplingParams
    stream: Stream | None = None
    finished: bool = False

    @property
    def ticket_id(self) -> int:
        return self.entry.ticket_id

    def alone(self, num_tokens: int) -> list[int]:
        """Prompt and answer of an undisturbed run."""
        token_ids = list(self.entry.token_ids)
        while len(token_ids) < num_tokens:
            token_ids.append(say(token_ids, self.sampling.seed))
        return token_ids


class SchedulerMachine(RuleBasedStateMachine):
    """Scheduler and ledger as the worker drives them, with a pool that holds about three answers."""

    num_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cache = PrefixCache(self.num_blocks)
        self.ledger = Ledger(
            self.cache,
            BLOCK_SIZE,
            LEASE_S,
            lambda: self.now,
            on_committed=lambda entry: None,
            on_failed=lambda entry: self.scheduler.remove(entry.ticket_id),
            on_settled=lambda: None,
        )
        self.scheduler = DecodeScheduler(self.ledger, MAX_BATCH_SIZE, CUT, TURN_S, lambda: self.now)
        self.engine = Engine()
        self.requests: list[Request] = []
        self.step: list[tuple[Request, Chunk]] = []
        self.pinned: list[Stream] = []
        """Those that migrate; some of them are paused."""

    def _live(self, *states: TicketState) -> list[Request]:
        return [request for request in self.requests if request.entry.state in states]

    # -- what may happen at any moment, also during a step -----------------------------------------------------------

    @rule(
        owner=st.sampled_from(ROUTERS),
        kind=st.integers(0, 2),
        prompt=st.integers(1, 20),
        answer=st.integers(2, 29),
        copies=st.integers(1, 8),
        share=st.sampled_from(SHARES),
    )
    def arrive(self, owner: bytes, kind: int, prompt: int, answer: int, copies: int, share: Share = SHARES[0]) -> None:
        """Prompts of one kind begin alike. Who finds no room wants some, as the worker has it."""
        room = self.scheduler.room
        for _ in range(copies):
            number = len(self.requests)
            token_ids = tuple(range(1000 * kind, 1000 * kind + prompt))
            spare = room.spare_beside(share, displaces=True)
            entry = self.ledger.reserve(owner, token_ids, answer, "", own_tokens=1, share=share, spare=spare)
            if entry is None:
                keys = block_keys(token_ids, BLOCK_SIZE, "")
                cost = partial(self.ledger.blocks.reserve_cost, keys, prompt, answer, own_tokens=1)
                room.want(share, self.ledger.blocks.most_reserved(prompt, answer), cost)
            else:
                room.granted(share)
                self.requests.append(Request(entry, SamplingParams(seed=number, max_tokens=answer)))

    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        if found := self._live(TicketState.RESERVED):
            self._hand_over(data.draw(st.sampled_from(found)))

    def _hand_over(self, request: Request) -> None:
        entry, num_tokens = request.entry, len(request.entry.token_ids)
        start = entry.held_tokens
        if start < num_tokens:
            assert self.ledger.begin_push(b"prefill", entry.ticket_id, entry.transfer_id, start, num_tokens - start)
            self.engine.write(entry.block_table, list(entry.token_ids), start)
            self.ledger.end_push(entry.ticket_id, num_tokens - start, ok=True)
        assert self.ledger.commit(entry.ticket_id, entry.transfer_id, num_tokens)

    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        if found := self._live(TicketState.COMMITTED):
            self._attach(data.draw(st.sampled_from(found)))

    def _attach(self, request: Request) -> None:
        entry = request.entry
        assert self.scheduler.attached.attach(entry.ticket_id) is entry
        token_ids = request.alone(len(entry.token_ids) + 1)
        request.stream = Stream(
            entry.ticket_id,
            entry.owner,
            entry.block_table,
            request.sampling,
            token_ids,
            1,
            len(entry.token_ids),
            share=entry.share,
        )
        self.scheduler.add(request.stream)

    @rule(data=st.data())
    def prefill_here(self, data: st.DataObject) -> None:
        if found := self._live(TicketState.RESERVED):
            self._prefill_here(data.draw(st.sampled_from(found)))

    def _prefill_here(self, request: Request) -> None:
        entry = request.entry
        assert self.scheduler.attached.attach_here(entry.ticket_id) is entry
        prefill = LocalPrefill(entry.held_tokens, None)
        request.stream = Stream(
            entry.ticket_id,
            entry.owner,
            entry.block_table,
            request.sampling,
            list(entry.token_ids),
            0,
            entry.held_tokens,
            prefill=prefill,
            share=entry.share,
        )
        self.scheduler.add(request.stream)

    @rule(here=st.booleans())
    def start_all(self, here: bool = False) -> None:
        """Whatever has a ticket joins the batch."""
        for request in self._live(TicketState.RESERVED):
            if here:
                self._prefill_here(request)
            else:
                self._hand_over(request)
        for request in self._live(TicketState.COMMITTED):
            self._attach(request)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.requests:
            ticket_id = data.draw(st.sampled_from(self.requests)).ticket_id
            self.scheduler.remove(ticket_id)
            self.ledger.release(ticket_id)

    @rule(peer=st.sampled_from([*ROUTERS, b"prefill"]))
    def peer_lost(self, peer: bytes) -> None:
        self.ledger.peer_lost(peer)

    @rule(seconds=st.floats(0, 2 * LEASE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire()

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """A stream begins to migrate."""
        streams = [r.stream for r in self._live(TicketState.ATTACHED) if r.stream and r.stream.complete and not r.stream.pinned]
        if streams:
            stream = data.draw(st.sampled_from(streams))
            self.scheduler.attached.begin_send(stream.ticket_id)
            stream.pinned = True
            self.pinned.append(stream)

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        if self.pinned:
            data.draw(st.sampled_from(self.pinned)).paused = True

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """It stays, after all."""
        if self.pinned:
            self._unpin(data.draw(st.sampled_from(self.pinned)))

    def _unpin(self, stream: Stream) -> None:
        self.pinned.remove(stream)
        stream.pinned = stream.paused = False
        self.scheduler.attached.end_send(stream.ticket_id)

    # -- steps -------------------------------------------------------------------------------------------------------

    @rule()
    def begin_step(self) -> None:
        if self.step:
            return
        attached = self._live(TicketState.ATTACHED)
        by_stream = {request.stream: request for request in attached}
        self.step = [(by_stream[stream], self.scheduler.chunk(stream)) for stream in self.scheduler.plan()]
        assert len(self.step) <= MAX_BATCH_SIZE
        self._check_chunks()
        assert not any(request.stream.paused for request, _ in self.step if request.stream)
        if attached and not self.pinned and not self._live(TicketState.RESERVED, TicketState.COMMITTED):
            assert self.step, "nothing that could free a block is under way, and nothing is computed"
        self.scheduler.attached.begin_step([request.ticket_id for request, _ in self.step])

    def _check_chunks(self) -> None:
        """Whatever is more than one token is cut where prefill cuts, and all of it is no more than one step of prefill."""
        chunks = [(request.stream, chunk) for request, chunk in self.step if request.stream and request.stream.remaining > 1]
        assert sum(len(chunk.token_ids) for _, chunk in chunks) <= CUT
        for stream, chunk in chunks:
            assert chunk.start == stream.computed
            assert chunk.end in ((chunk.start // CUT + 1) * CUT, len(stream.token_ids))
            assert (chunk.sampling is not None) == (chunk.end == len(stream.token_ids))

    @rule()
    def end_step(self) -> None:
        step, self.step = self.step, []
        for request, chunk in step:
            token_id = self.engine.compute(chunk)
            stream = request.stream
            assert stream is not None
            if stream.ticket_id in self.scheduler:
                self.scheduler.computed(stream, chunk)
                if token_id is not None:
                    self._emit(request, stream, token_id)
        self.scheduler.attached.end_step([request.ticket_id for request, _ in step])

    def _emit(self, request: Request, stream: Stream, token_id: int) -> None:
        stream.append(token_id)
        stream.prefill = None
        assert stream.token_ids == request.alone(len(stream.token_ids)), "not what it says when it is alone"
        if stream.num_generated == request.sampling.max_tokens:
            request.finished = True
            self.scheduler.remove(stream.ticket_id)
            self.scheduler.attached.keep(stream.ticket_id, stream.token_ids, stream.computed)
            self.ledger.release(stream.ticket_id)

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check_integrity()
        assert all(stream.block_table for stream in self.pinned), "what is sent is not taken away"
        assert len(self.scheduler) == len(self._live(TicketState.ATTACHED))

    def teardown(self) -> None:
        """No more comes: everything that has a ticket finishes, and then every block is free."""
        self.end_step()
        for stream in list(self.pinned):
            self._unpin(stream)
        self.start_all()
        attached = self._live(TicketState.ATTACHED)
        for _ in range(2 * sum(len(request.entry.token_ids) + request.sampling.max_tokens for request in attached)):
            self.begin_step()
            self.books_balance()
            self.end_step()
        assert all(request.finished for request in attached), "a stream starves"
        assert len(self.ledger) == 0
        assert self.cache.num_free == NUM_BLOCKS


SchedulerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50)
TestDecodeScheduler = SchedulerMachine.TestCase


class Crowd:
    """Streams of a 4-token prompt each that are attached at once and then run to their ends."""

    def __init__(self, num_streams: int, max_tokens: int) -> None:
        self.world = SchedulerMachine()
        for kind in range(num_streams):
            self.world.arrive(b"router-1", kind, BLOCK_SIZE, max_tokens, 1)
        self.world.start_all()
        self.requests = self.world.requests

    def step(self) -> list[tuple[int, int, bool]]:
        """One step: for each chunk its ticket, its number of tokens and whether it samples."""
        self.world.begin_step()
        planned = [(request.ticket_id, len(chunk.token_ids), chunk.sampling is not None) for request, chunk in self.world.step]
        self.world.end_step()
        return planned


def test_the_youngest_gives_way_and_comes_back_beside_the_others() -> None:
    crowd = Crowd(4, 30)
    assert [request.ticket_id for request in crowd.requests] == [1, 2, 3, 4], "two blocks each, and four free"
    scheduler = crowd.world.scheduler
    while not scheduler.preemptions:
        assert [ticket_id for ticket_id, *_ in crowd.step()][:3] == [1, 2, 3]
    assert [request.entry.preempted for request in crowd.requests] == [False, False, False, True]
    assert scheduler.num_preempted == 1
    while not scheduler.recomputed_tokens:
        planned = crowd.step()
    (again,) = (each for each in planned if each[1:] != (1, True))
    assert again[0] > 1
    assert again[1:] == (CUT, False)
    while len(scheduler):
        crowd.step()
    assert scheduler.preemptions > 1
    assert crowd.world.cache.num_free == NUM_BLOCKS


def test_alone_and_with_nothing_free_the_oldest_waits_for_tickets_that_come_or_go() -> None:
    crowd = Crowd(1, 30)
    world = crowd.world
    world.arrive(b"router-2", 1, 20, 2, 1)
    world.arrive(b"router-2", 2, 1, 2, 1)
    pending = [request.ticket_id for request in world.requests[1:]]
    assert len(pending) == 2
    assert [len(planned) for planned in iter(crowd.step, [])] == [1] * 16, "five blocks have 20 slots"
    assert world.cache.num_free == 0
    assert world.scheduler.preemptions == 0
    world.ledger.release(pending[0])
    assert crowd.step() == [(1, 1, True)]


def test_short_prompts_share_a_step_and_long_ones_go_chunk_by_chunk_beside_running_streams() -> None:
    crowd = Crowd(1, 12)
    world = crowd.world
    for kind, prompt in enumerate((2, 14, 3), start=1):
        world.arrive(b"router-1", kind, prompt, 2, 1)
    world.start_all(here=True)
    steps = [crowd.step() for _ in range(4)]
    assert steps[0] == [(1, 1, True), (2, 2, True)], "the next prompt's first chunk is as long as a step"
    assert steps[1] == [(1, 1, True), (2, 1, True), (3, CUT, False)]
    assert steps[2] == [(1, 1, True), (3, CUT, False)]
    assert steps[3] == [(1, 1, True), (3, 2, True), (4, 3, True)]
    assert world.scheduler.prefilled_tokens == 2 + 14 + 3
    assert world.scheduler.queued_tokens == world.scheduler.recomputed_tokens == 0


class LargerMachine(SchedulerMachine):
    num_blocks = 100


def test_short_prompts_go_between_two_chunks_of_a_long_one() -> None:
    world = LargerMachine()
    for kind, prompt in enumerate((300, 40, 5)):
        world.arrive(b"router-1", kind, prompt, 2, 1)
    world.start_all(here=True)
    prompts = [request.stream for request in world.requests]
    steps = []
    for _ in range(18):
        world.begin_step()
        steps.append([prompts.index(each.stream) for each, _ in world.step if each.stream and each.stream.remaining > 1])
        world.end_step()
    assert steps[:4] == [[0], [2], [0], [1]], "what needs one step first"
    assert steps[4:16] == [[0], [1]] * 6
    assert steps[16:] == [[0], [0]]


def test_a_prompt_that_was_computed_here_is_held_for_the_next_one() -> None:
    world = SchedulerMachine()
    for _ in range(2):
        world.arrive(b"router-1", 0, 3 * BLOCK_SIZE, 2, 1)
        world.start_all(here=True)
        for _ in range(4):
            world.begin_step()
            world.end_step()
    first, second = world.requests
    assert (first.entry.held_tokens, second.entry.held_tokens) == (0, 2 * BLOCK_SIZE), "the last token is computed again"
    assert first.finished
    assert second.finished


class ScoringMachine(SchedulerMachine):
    num_blocks = 4000


def test_no_step_has_more_rows_of_scored_prompts_than_memory_is_set_aside_for() -> None:
    """Each token of such a prompt is a row of logits, beside the row that every stream may have."""
    world = ScoringMachine()
    world.scheduler = scheduler = DecodeScheduler(world.ledger, 64, 2048, TURN_S, lambda: world.now)
    for kind in range(12):
        world.arrive(b"router-1", kind, 600 if kind % 2 else 20, 2, 1)
    world.start_all(here=True)
    for stream in scheduler.streams:
        assert stream.prefill is not None
        stream.prefill.scores = PromptScores((), 0)
    while planned := scheduler.plan():
        chunks = [(stream, scheduler.chunk(stream)) for stream in planned]
        assert sum(len(chunk.token_ids) for _, chunk in chunks) <= SAMPLED_TOKENS
        for stream, chunk in chunks:
            scheduler.computed(stream, chunk)
            if chunk.end == len(stream.token_ids):
                scheduler.remove(stream.ticket_id)
    assert not scheduler.streams
    assert scheduler.prefilled_tokens == 6 * (600 + 20)


def test_a_scored_prompt_that_lacks_rows_lets_others_pass_that_are_not_scored() -> None:
    world = ScoringMachine()
    world.scheduler = scheduler = DecodeScheduler(world.ledger, 64, 2048, TURN_S, lambda: world.now)
    sizes = (300, 240, 5, 20)
    for kind, size in enumerate(sizes):
        world.arrive(b"router-1", 2 * kind, size, 2, 1)
    world.start_all(here=True)
    streams = list(scheduler.streams)
    for stream in streams[:3]:
        assert stream.prefill is not None
        stream.prefill.scores = PromptScores((), 0)
    plans = []
    for _ in range(3):
        planned = [(stream, scheduler.chunk(stream)) for stream in scheduler.plan()]
        plans.append([streams.index(stream) for stream, _ in planned])
        for stream, chunk in planned:
            scheduler.computed(stream, chunk)
            if chunk.end == len(stream.token_ids):
                scheduler.remove(stream.ticket_id)
    assert plans == [[0, 3], [0], [1, 2]], "the small one does not go before the second"

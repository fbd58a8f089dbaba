"""Scheduler, ledger and room together, without an engine: with too few seats and too few blocks every stream ends, none waits
for long, and what is computed again is bounded."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_workers.ledger import Ledger
from decode_workers.rules.preemption import BUDGET_SHARE
from decode_workers.rules.turns import SLICE_STEPS
from decode_workers.scheduler import DecodeScheduler
from decode_workers.stream import Stream
from decode_workers.ticket_blocks import Cost
from engine.memory.prefix_cache import PrefixCache
from protocol.cache.keys import block_keys
from protocol.sampling import SamplingParams
from protocol.share import Share

EXAMPLES = 2_000 if os.environ.get("TANDEM_THOROUGH") else 60
BLOCK, CHUNK = 4, 64
STEP_S, TURN_S = 0.1, 4.0
ONE, TWO = Share(b"one", 1.0), Share(b"two", 1.0)


@dataclass
class World:
    """A decode worker whose streams say anything. A step takes STEP_S."""

    num_seats: int
    num_blocks: int
    now: float = 0.0
    ended: dict[int, float] = field(default_factory=dict)
    """When each ticket's answer ended."""
    latest: dict[int, float] = field(default_factory=dict)
    """When each ticket that runs had its latest token, or was attached."""
    longest_gap_s: float = 0.0

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.num_blocks)
        self.ledger = Ledger(
            self.cache,
            BLOCK,
            1e9,
            lambda: self.now,
            on_committed=lambda entry: None,
            on_failed=lambda entry: None,
            on_settled=lambda: None,
        )
        self.scheduler = DecodeScheduler(self.ledger, self.num_seats, CHUNK, TURN_S, lambda: self.now)

    def attach(self, prompt: int, answer: int, share: Share, common: int = 0) -> int | None:
        """Reserve and attach a stream whose KV is here at once. None, and the worker knows what is wanted, if it is full. Its
        first `common` tokens are those of all that have some.
        """
        room, number = self.scheduler.room, len(self.latest) + len(self.ended)
        if self.scheduler.wait_s(share) > TURN_S:
            return None
        own = range(1000 * number + common, 1000 * number + prompt)
        token_ids = (*range(1_000_000, 1_000_000 + common), *own)
        entry = self.ledger.reserve(b"r", token_ids, answer, "", share=share, spare=room.spare_beside(share, displaces=True))
        if entry is None:
            cost = partial(self.ledger.blocks.reserve_cost, block_keys(token_ids, BLOCK, ""), prompt, answer)
            room.want(share, self.ledger.blocks.most_reserved(prompt, answer), cost)
            return None
        room.granted(share)
        if (missing := prompt - entry.held_tokens) > 0:
            self.ledger.begin_push(b"p", entry.ticket_id, entry.transfer_id, entry.held_tokens, missing)
            self.ledger.end_push(entry.ticket_id, missing, ok=True)
        assert self.ledger.commit(entry.ticket_id, entry.transfer_id, prompt)
        assert self.scheduler.attached.attach(entry.ticket_id)
        sampling = SamplingParams(seed=0, max_tokens=answer, temperature=0.0)
        stream = Stream(entry.ticket_id, b"r", entry.block_table, sampling, [*token_ids, 0], 1, len(token_ids), share=share)
        self.scheduler.add(stream)
        self.latest[entry.ticket_id] = self.now
        return entry.ticket_id

    def step(self) -> None:
        batch = self.scheduler.plan()
        assert len(batch) <= self.num_seats
        assert batch or not self.latest, "nothing is computed"
        chunks = [self.scheduler.chunk(stream) for stream in batch]
        tickets = [stream.ticket_id for stream in batch]
        self.scheduler.attached.begin_step(tickets)
        self.now += STEP_S
        self.scheduler.took(STEP_S)
        for stream, chunk in zip(batch, chunks, strict=True):
            self.scheduler.computed(stream, chunk)
            if chunk.sampling is None:
                continue
            stream.append(0)
            self.longest_gap_s = max(self.longest_gap_s, self.now - self.latest[stream.ticket_id])
            self.latest[stream.ticket_id] = self.now
            if stream.num_generated == stream.sampling.max_tokens:
                self.scheduler.remove(stream.ticket_id)
                self.scheduler.attached.keep(stream.ticket_id, stream.token_ids, stream.computed)
                self.ledger.release(stream.ticket_id)
                self.ended[stream.ticket_id] = self.now
                del self.latest[stream.ticket_id]
        self.scheduler.attached.end_step(tickets)
        self.ledger.check_integrity()

    def steps_until(self, ticket_id: int) -> int:
        """Number of steps until this answer has ended."""
        began = self.now
        while ticket_id not in self.ended:
            self.step()
        return round((self.now - began) / STEP_S)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(24, 80),
    st.lists(st.tuples(st.integers(1, 12), st.integers(2, 80), st.sampled_from([ONE, TWO])), min_size=2, max_size=14),
)
def test_every_stream_ends_and_none_waits_for_long(
    num_seats: int, num_blocks: int, wanted: list[tuple[int, int, Share]]
) -> None:
    world = World(num_seats, num_blocks)
    run_all(world, wanted)
    tokens = sum(prompt + answer for prompt, answer, _ in wanted)
    rounds_s = 4 * len(wanted) * SLICE_STEPS * STEP_S
    again_s = tokens / (CHUNK / BUDGET_SHARE) * STEP_S
    assert world.longest_gap_s <= TURN_S / 2 + rounds_s + again_s


def run_all(world: World, wanted: list[tuple[int, int, Share]], common: int = 0) -> None:
    """All are wanted from the beginning on; each is attached as soon as the worker takes it. Their prompts are longer by the
    `common` tokens that all begin with.
    """
    waiting, steps = list(wanted), 0
    while waiting or world.latest:
        waiting = [each for each in waiting if world.attach(common + each[0], *each[1:], common) is None]
        world.step()
        steps += 1
        assert steps < 20_000, "a stream starves"
    assert world.cache.num_free == world.num_blocks


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(2, 6), st.integers(24, 60), st.integers(4, 20))
def test_what_is_exchanged_in_turn_is_bounded(num_seats: int, num_blocks: int, num_streams: int) -> None:
    """As many streams of one tenant as the worker takes, for as long as they last: nothing is computed again without end."""
    world = World(num_seats, num_blocks)
    for _ in range(num_streams):
        world.attach(4, 60, ONE)
    steps = 0
    while world.latest:
        world.step()
        steps += 1
    generated = 59 * len(world.ended)
    assert world.scheduler.recomputed_tokens <= generated + steps * CHUNK / BUDGET_SHARE + 128 * CHUNK / BUDGET_SHARE


def crowded(num_streams: int, answer: int, num_seats: int, num_blocks: int) -> World:
    """So many streams of one tenant that have been running for a while."""
    world = World(num_seats, num_blocks)
    for _ in range(num_streams):
        assert world.attach(4, answer, ONE) is not None
    while min(world.scheduler._streams[ticket_id].num_generated for ticket_id in world.latest) < 34:
        world.step()
    return world


def test_a_short_answer_beside_more_long_ones_than_a_step_holds() -> None:
    """It takes as many steps as it has tokens, though others came first, in a pool that holds all and one that holds half."""
    for num_blocks in (19 * 31 + 20, 19 * 31 // 2):
        for share in (ONE, TWO):
            world = crowded(19, 120, 8, num_blocks)
            for _ in range(200):
                world.step()
            for _ in range(20):
                ticket_id = world.attach(4, 20, share)
                refused = 0
                while ticket_id is None:
                    world.step()
                    refused += 1
                    ticket_id = world.attach(4, 20, share)
                assert refused <= 2, "room is made between two steps"
                assert world.steps_until(ticket_id) <= 25


def test_who_is_preempted_comes_back_in_turn_though_the_others_have_not_ended() -> None:
    """Two long answers, and a pool for one and a half of them."""
    world = World(4, 80)
    first, second = world.attach(4, 250, ONE), world.attach(4, 250, ONE)
    assert first is not None
    assert second is not None
    while world.latest:
        world.step()
    assert world.scheduler.preemptions >= 2
    assert world.longest_gap_s <= TURN_S
    assert world.ended[second] - world.ended[first] < 250 * STEP_S / 2, "they took turns"


@pytest.mark.parametrize(
    ("num_seats", "num_blocks", "answers", "others", "prompt"), [(8, 100, (107, 195), ONE, 40), (16, 80, (82, 100), TWO, 20)]
)
def test_a_preempted_stream_comes_back_though_short_answers_come_without_end(
    num_seats: int, num_blocks: int, answers: tuple[int, int], others: Share, prompt: int
) -> None:
    """None of those is ever old enough to give its blocks back, and one more is always wanted than the worker has room for."""
    world = World(num_seats, num_blocks)
    assert world.attach(4, answers[0], ONE) is not None
    younger = world.attach(4, answers[1], ONE)
    assert younger is not None
    for step in range(600):
        while step > 56 and world.attach(prompt, 8, others) is not None:
            pass
        world.step()
        if younger in world.ended:
            break
    assert younger in world.ended, "it starves"
    assert world.scheduler.preemptions


def test_a_preempted_stream_keeps_its_own_tenants_tickets_waiting_not_everybodys() -> None:
    world = World(8, 60)
    for _ in range(12):
        world.attach(8, 150, ONE)
    while not world.scheduler.room.wait_s(ONE, STEP_S) > TURN_S:
        world.step()
    assert world.attach(4, 4, ONE) is None
    refused = 0
    while world.attach(4, 4, TWO) is None:
        world.step()
        refused += 1
    assert refused <= 2


def test_room_that_was_made_is_kept_for_its_tenant_only_for_a_while() -> None:
    world = crowded(3, 60, 8, 60)
    room = world.scheduler.room
    room.want(ONE, 5, lambda: Cost(5, ()))
    world.step()
    assert room.spare_beside(ONE, displaces=True) == 3, "its own tenant's streams have seats: nobody has to give"
    room.want(TWO, 5, lambda: Cost(5, ()))
    world.step()
    assert room.spare_beside(ONE, displaces=True) == 3 + 5
    assert room.spare_beside(TWO, displaces=False) == 3 + 5
    assert room.spare_beside(TWO, displaces=True) == 1
    assert world.scheduler.preemptions == 0, "there was enough"
    world.now += 2.0
    world.step()
    assert room.spare_beside(ONE, displaces=True) == 3


def test_drafts_get_slots_that_nobody_else_wants() -> None:
    """The rest of the stream's own block, and another while one is left for each; none while one waits."""
    world = World(4, 20)
    first, second = world.attach(4, 60, ONE), world.attach(4, 60, ONE)
    assert first is not None
    assert second is not None
    world.step()
    room, stream = world.scheduler.room, world.scheduler.find(first)
    assert stream is not None
    free = world.ledger.blocks.num_free
    own = len(stream.block_table) * BLOCK - len(stream.token_ids)
    assert room.draft_slots(stream, own) == own
    assert world.ledger.blocks.num_free == free
    assert room.draft_slots(stream, own + 1) == own + 1
    assert world.ledger.blocks.num_free == free - 1
    assert room.draft_slots(stream, 200) == own + (free - 2) * BLOCK, "all but one for each of both"
    assert world.ledger.blocks.num_free == 2
    world.step()
    while world.ledger.blocks.num_free > 2:
        world.step()
    own = len(stream.block_table) * BLOCK - len(stream.token_ids)
    assert room.draft_slots(stream, own + 1) == own, "a block for each of both is left, and not more"
    room.want(TWO, 5, lambda: Cost(5, ()))
    assert room.draft_slots(stream, own + 1) == own
    assert world.scheduler.preemptions == 0


def test_room_is_not_kept_for_a_newcomer_that_has_left_an_idle_worker() -> None:
    """Nothing is computed any more when the newcomer's second is over, and nobody looks but the next one."""
    world = World(num_seats=8, num_blocks=100)
    tickets = [world.attach(48, 200, ONE) for _ in range(4)]
    for _ in range(40):
        world.step()
    assert world.attach(200, 200, TWO) is None
    world.scheduler.plan()
    assert world.scheduler.num_preempted, "room is made"
    for ticket_id in tickets:
        assert ticket_id is not None
        world.scheduler.remove(ticket_id)
        world.ledger.release(ticket_id)
    world.scheduler.plan()
    assert world.ledger.blocks.num_free == 100
    three = Share(b"three", 1.0)
    assert world.attach(280, 100, three) is None, "for a second"
    world.now += 60.0
    assert world.attach(280, 100, three) is not None


def test_nobody_gives_blocks_for_a_newcomer_that_can_not_get_enough() -> None:
    """Those that others own as well do not come free."""
    ran: list[tuple[int, int]] = []
    for newcomer in (False, True):
        world = World(4, 120)
        for _ in range(3):
            assert world.attach(40 * BLOCK + 3, 140, ONE, common=40 * BLOCK) is not None
        for _ in range(40):
            world.step()
        before, again = world.scheduler.preemptions, world.scheduler.recomputed_tokens
        for _ in range(98):
            assert not newcomer or world.attach(85 * BLOCK, 16, TWO) is None
            world.step()
        ran.append((world.scheduler.preemptions - before, world.scheduler.recomputed_tokens - again))
    assert ran[0] == ran[1]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(40, 80),
    st.lists(st.tuples(st.integers(1, 12), st.integers(2, 80), st.sampled_from([ONE, TWO])), min_size=2, max_size=14),
)
def test_streams_that_share_their_beginning_end_as_well(
    num_seats: int, num_blocks: int, wanted: list[tuple[int, int, Share]]
) -> None:
    run_all(World(num_seats, num_blocks), wanted, common=12 * BLOCK)


def test_a_newcomer_takes_from_others_what_it_does_not_share() -> None:
    world = World(4, 134)
    for number in range(6):
        assert world.attach(40 * BLOCK + 3, 60, ONE, common=40 * BLOCK) is not None, number
    while min(world.scheduler._streams[ticket_id].num_generated for ticket_id in world.latest) < 34:
        world.step()
    newcomer, refused = world.attach(40 * BLOCK + 3, 60, TWO, common=40 * BLOCK), 0
    while newcomer is None:
        world.step()
        refused += 1
        newcomer = world.attach(40 * BLOCK + 3, 60, TWO, common=40 * BLOCK)
    assert refused <= 2
    assert world.scheduler.preemptions <= 2


def test_what_a_refused_newcomer_would_have_shared_may_be_gone_when_room_is_made_for_it() -> None:
    """Another newcomer comes between its refusal and the next step, and takes the cached blocks."""
    world = World(4, 60)
    ended = world.attach(20 * BLOCK, 4, ONE, common=20 * BLOCK)
    assert ended is not None
    world.steps_until(ended)
    assert world.attach(10 * BLOCK, 60, ONE) is not None
    cached = set(world.cache.keys())
    assert world.attach(50 * BLOCK, 36, TWO, common=20 * BLOCK) is None
    assert world.attach(40 * BLOCK, 4, TWO) is not None
    assert not cached <= set(world.cache.keys()), "it took what was cached"
    world.step()
    while world.latest:
        world.step()
    assert world.cache.num_free == world.num_blocks


def test_room_is_kept_for_what_a_newcomer_shared_with_those_that_gave_theirs() -> None:
    """It pays for these blocks once nobody else owns them. Another tenant asks for what would be left without them."""
    world = World(8, 138)
    assert world.attach(20 * BLOCK, 190, ONE) is not None
    giver = world.attach(60 * BLOCK, 190, ONE, common=40 * BLOCK)
    for _ in range(70):
        world.step()
    assert giver is not None
    assert world.attach(65 * BLOCK, 4, TWO, common=40 * BLOCK) is None
    world.step()
    assert world.scheduler.preemptions == 1
    assert world.attach(44 * BLOCK, 4, Share(b"three", 1.0)) is None
    assert world.attach(65 * BLOCK, 4, TWO, common=40 * BLOCK) is not None

"""Seats in a step, by the rule alone: nobody starves, tenants are served by their weights, and a short answer does not wait."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_workers.rules.turns import SLICE_STEPS, YOUNG_TOKENS, Turn, Turns, turn_wait_s
from protocol.share import Share

EXAMPLES = 5_000 if os.environ.get("TANDEM_THOROUGH") else 150
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0])


@dataclass
class World:
    """Streams that come and go, and a worker with so many seats."""

    num_seats: int
    turns: Turns = field(init=False)
    streams: list[Turn] = field(default_factory=list)
    """Oldest first."""
    served: dict[Share, int] = field(default_factory=dict)
    """Tokens by tenant."""
    num_added: int = 0

    def __post_init__(self) -> None:
        self.turns = Turns()

    def add(self, share: Share, generated: int = 0) -> Turn:
        self.num_added += 1
        turn = Turn(self.num_added, share, generated)
        self.streams.append(turn)
        return turn

    def remove(self, turn: Turn) -> None:
        self.streams.remove(turn)
        self.turns.leave(turn)

    def serve(self, steps: int = SLICE_STEPS) -> list[Turn]:
        """Give seats for so many steps."""
        order = self.turns.order(self.streams, self.num_seats)
        assert sorted(turn.ticket_id for turn in order) == [turn.ticket_id for turn in self.streams], "each stream once"
        seated = order[: self.num_seats]
        for turn in seated:
            turn.generated += steps
            self.served[turn.share] = self.served.get(turn.share, 0) + steps
        return seated


def shares(count: int) -> st.SearchStrategy[list[Share]]:
    return st.lists(WEIGHTS, min_size=count, max_size=count).map(
        lambda weights: [Share(bytes([number]), weight) for number, weight in enumerate(weights)]
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.integers(1, 8),
    shares(3),
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, SLICE_STEPS)), min_size=20, max_size=80),
)
def test_each_stream_has_its_turn_within_four_seats_of_its_tenant_for_each_stream(
    num_seats: int, tenants: list[Share], events: list[tuple[int, bool, int]]
) -> None:
    """Whatever comes and goes meanwhile, and however short the slices are cut."""
    world = World(num_seats)
    owed: dict[Turn, tuple[int, int]] = {}
    """For each stream the seats of its tenant when it had its latest turn, and after how many more it has the next one."""
    seats = dict.fromkeys(tenants, 0)

    def expect(turn: Turn) -> None:
        owed[turn] = seats[turn.share], 4 * sum(each.share == turn.share for each in world.streams) + 4

    for tenant, comes, steps in events:
        if comes or len(world.streams) <= num_seats:
            for _ in range(max(1, num_seats + 1 - len(world.streams))):
                expect(world.add(tenants[tenant]))
        else:
            world.remove(world.streams[tenant % len(world.streams)])
        for turn in world.serve(steps):
            seats[turn.share] += 1
        for turn in world.streams:
            if turn.latest == world.turns._choices:
                expect(turn)
            since, within = owed[turn]
            assert seats[turn.share] - since <= within, "a stream starves"


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.integers(1, 16),
    st.integers(2, 4).flatmap(shares),
    st.lists(st.integers(1, SLICE_STEPS), min_size=1, max_size=40),
)
def test_tenants_that_want_more_are_served_by_their_weights_to_within_one_slice(
    num_seats: int, tenants: list[Share], slices: list[int]
) -> None:
    world = World(num_seats)
    for _ in range(num_seats + 1):
        for share in tenants:
            world.add(share, generated=1000)
    for steps in slices:
        world.serve(steps)
        each = [world.served.get(share, 0) / share.weight for share in tenants]
        assert max(each) - min(each) <= SLICE_STEPS / min(share.weight for share in tenants)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(2, 8), st.integers(1, 40), st.integers(1, 40))
def test_a_tenant_with_a_seat_for_each_stream_saves_nothing_up(num_seats: int, alone: int, both: int) -> None:
    """One stream beside a crowd for a long time; then it gets a crowd of its own, and has half of the seats, not all."""
    world, few, many = World(num_seats), Share(b"few", 1.0), Share(b"many", 1.0)
    world.add(few, generated=1000)
    for _ in range(2 * num_seats):
        world.add(many, generated=1000)
    for _ in range(alone):
        assert few in [turn.share for turn in world.serve()]
    for _ in range(2 * num_seats):
        world.add(few, generated=1000)
    world.served.clear()
    for _ in range(both):
        world.serve()
        assert abs(world.served.get(few, 0) - world.served.get(many, 0)) <= 2 * SLICE_STEPS


def test_a_newcomer_keeps_its_seat_while_it_is_young() -> None:
    """Of the same tenant as 150 others, and of another one."""
    crowd, other = Share(b"crowd", 1.0), Share(b"other", 1.0)
    world = World(64)
    for _ in range(150):
        world.add(crowd)
    for _ in range(40):
        world.serve()
    for share in (crowd, other):
        short = world.add(share)
        for _ in range(YOUNG_TOKENS):
            assert short in world.serve(1)
        world.remove(short)


def test_three_quarters_of_a_tenants_seats_stay_with_its_oldest_streams() -> None:
    world = World(64)
    old = [world.add(Share(b"", 1.0), generated=1) for _ in range(150)]
    for turn in old:
        turn.generated += YOUNG_TOKENS
    world.serve()
    for _ in range(20):
        assert set(old[:48]) <= set(world.serve())


def test_a_tenant_of_a_lower_weight_has_its_part() -> None:
    """Also one seat among few, and though the other's streams are always new."""
    heavy, light = Share(b"heavy", 8.0), Share(b"light", 0.125)
    world = World(2)
    world.add(light, generated=1000)
    for _ in range(400):
        while len(world.streams) < 5:
            world.add(heavy)
        world.serve()
        for turn in [turn for turn in world.streams if turn.attained >= 2 * SLICE_STEPS and turn.share == heavy]:
            world.remove(turn)
    assert 0.8 <= (world.served[heavy] / 8.0) / (world.served[light] / 0.125) <= 1.2


def test_who_came_back_is_young_again() -> None:
    turn = Turn(1, Share(b"", 1.0), 500)
    turn.generated += YOUNG_TOKENS
    assert not turn.young
    turn.came_back()
    assert turn.young


def test_the_wait_for_a_turn_grows_with_the_tenants_streams_alone() -> None:
    mine, others = Share(b"mine", 1.0), Share(b"others", 1.0)
    assert turn_wait_s(64, mine, {mine}, 64, 0.1) == 0.0
    assert turn_wait_s(1, mine, {others}, 64, 0.1) == 0.0, "half of the seats are mine"
    crowded = turn_wait_s(150, mine, {mine}, 64, 0.1)
    assert 0.0 < crowded < turn_wait_s(150, mine, {mine, others}, 64, 0.1) < turn_wait_s(300, mine, {mine, others}, 64, 0.1)
    assert crowded == 4 * 150 / 64 * SLICE_STEPS * 0.1

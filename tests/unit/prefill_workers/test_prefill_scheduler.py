"""Chunks cover what is not cached of every prompt once, in order, within the budget; blocks are never lost."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from configs.arithmetic import goes_between
from configs.model_files.kv_window import WHOLE, KvWindow
from configs.schema import SAMPLED_TOKENS, PrefillConfig
from engine.memory.prefix_cache import PrefixCache
from prefill_workers.scheduler import PlannedChunk, PrefillScheduler, Prompt
from tests.unit.counted_keys import CountedKeys

BLOCK_SIZE = 4
OVERTAKEN = 2
"""Prompts of at most 40 tokens that are computed in part at a time: each lets one go between that is a quarter as long."""


def steps_of(max_batch_tokens: int, saturation_tokens: int = 1_000_000) -> PrefillConfig:
    return PrefillConfig(max_batch_tokens=max_batch_tokens, saturation_tokens=saturation_tokens)


def step(scheduler: PrefillScheduler) -> list[PlannedChunk]:
    """Plan a step and let it be computed."""
    plan = scheduler.plan()
    scheduler.step_done(plan)
    return plan


def added(scheduler: PrefillScheduler, *prompts: range, salt: str = "") -> list[Prompt]:
    made = [scheduler.new_prompt(prompt, salt) for prompt in prompts]
    for prompt in made:
        scheduler.add(prompt)
    return made


class Run:
    """A run with any number of prompts, and what must hold after each step."""

    def __init__(self, budget: int, saturation: int, num_blocks: int, window: KvWindow) -> None:
        self.window = window
        self.budget = budget
        self.saturation = saturation
        self.cache = PrefixCache(num_blocks)
        self.scheduler = PrefillScheduler(self.cache, BLOCK_SIZE, steps_of(budget, saturation), window=window)
        self.prompts: list[Prompt] = []
        """That have arrived."""
        self.line: dict[bool, list[Prompt]] = {False: [], True: []}
        """Those of them that are not computed, in the order in which they are to start. True: those that came ahead."""
        self.passed = 0
        """Prompts that came ahead and were computed since one of the others had a step, while there were others."""
        self.passed_over: Prompt | None = None
        """The prompt that goes first and is being computed, where the latest step went to shorter ones."""
        self.overtaken: set[Prompt] = set()
        """Those of which that was so when it was their turn last."""
        self.lines_turn = False
        """A prompt that came ahead was computed, and the others have had no step since."""
        self.reached: dict[Prompt, int] = {}
        """How far its KV goes."""
        self.started: list[Prompt] = []
        self.finished: list[Prompt] = []
        self.held: list[Prompt] = []
        self.dropped: set[Prompt] = set()

    def arrive(self, prompt: Prompt, *, ahead: bool) -> None:
        self.scheduler.add(prompt, ahead=ahead)
        self.line[ahead].append(prompt)
        self.prompts.append(prompt)
        self.reached[prompt] = 0

    def drop(self, victim: Prompt) -> None:
        if victim not in self.finished and victim not in self.dropped:
            self.dropped.add(victim)
            self.line[victim in self.line[True]].remove(victim)
            self.scheduler.drop(victim)
            self.scheduler.release(victim)

    def step(self) -> list[PlannedChunk]:
        plan = self.scheduler.plan()
        assert sum(chunk.num_tokens for chunk in plan) <= (self.budget if len(plan) < 2 else min(self.budget, self.saturation))
        first = next(iter([*self.line[not self.lines_turn], *self.line[self.lines_turn]]), None)
        computed = [chunk.prompt for chunk in plan]
        self.passed_over = first if plan and first in self.started and first not in computed else None
        if self.passed_over is not None:
            assert self.passed_over not in self.overtaken, "every other turn is the long one's"
            assert not (self.lines_turn and self.line[False]) or set(computed) & set(self.line[False]), "its turn is its own"
            self.overtaken.add(self.passed_over)
        self.overtaken -= set(computed)
        if plan and set(computed) & set(self.line[False]):
            self.lines_turn = False
        elif any(chunk.last for chunk in plan):
            self.lines_turn = True
        for chunk in plan:
            self.check(chunk)
        self.scheduler.step_done(plan)
        self.cache.check_integrity([prompt.block_table.owned for prompt in self.prompts])
        waiting = [p for p in self.prompts if p not in self.dropped and p not in self.finished]
        reached = (self.reached[p] if p.block_table else p.likely_cached for p in waiting)
        assert self.scheduler.queued_tokens == sum(len(p.token_ids) for p in waiting) - sum(reached)
        return plan

    def left(self, prompt: Prompt) -> int:
        return len(prompt.token_ids) - self.reached[prompt]

    def check(self, chunk: PlannedChunk) -> None:
        prompt = chunk.prompt
        ahead = prompt in self.line[True]
        assert prompt not in self.dropped
        assert not (prompt.whole and prompt.cached), "nothing is taken from the cache"
        assert chunk.handoff_start == self.reached[prompt], "the handoff has no gap and no overlap"
        if prompt not in self.started:
            self.started.append(prompt)
            before = self.line[ahead][: self.line[ahead].index(prompt)]
            if not set(before) <= set(self.started):
                assert self.passed_over is not None, "it starts after all that go before it, or between the steps of a long one"
                likely = len(prompt.token_ids) - prompt.likely_cached
                assert goes_between(likely, len(self.passed_over.token_ids), self.budget, left=self.left(self.passed_over))
            assert chunk.start == prompt.cached
            assert prompt.cached % BLOCK_SIZE == 0
        else:
            assert chunk.start == self.reached[prompt]
        assert chunk.num_tokens > 0, "the last token is always computed"
        end = min(len(prompt.token_ids), (chunk.start // self.budget + 1) * self.budget)
        assert chunk.end == end, "cut alike in any company"
        own = prompt.block_table[chunk.start // BLOCK_SIZE :]
        others = [block for other in self.prompts if other is not prompt for block in other.block_table.owned]
        assert not set(own) & set(others), "what is written belongs to one prompt alone"
        needed = len(prompt.token_ids) if self.window is WHOLE else chunk.end
        assert len(prompt.block_table) * BLOCK_SIZE >= needed
        assert prompt.block_table.first * BLOCK_SIZE <= self.window.first_seen(chunk.start), "what is read is there"
        most = self.window.at_once(len(prompt.token_ids), max(self.budget, BLOCK_SIZE))
        assert (prompt.block_table.num_owned - 1) * BLOCK_SIZE < most
        self.reached[prompt] = chunk.end
        assert chunk.last == (chunk.end == len(prompt.token_ids))
        if chunk.last:
            self.finished.append(prompt)
            self.held.append(prompt)
            self.line[ahead].remove(prompt)
        self.passed = self.passed + chunk.last if ahead and self.line[False] else 0
        assert self.passed <= self.budget + OVERTAKEN, "as many as fit into a step, and who has its blocks goes on"


@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.booleans()), min_size=1, max_size=12),
    budget=st.integers(1, 32),
    saturation=st.integers(1, 40),
    num_blocks=st.integers(10, 40),
    window=st.sampled_from([WHOLE, KvWindow(0, unit=4, late=0), KvWindow(8, unit=4, late=0)]),
    data=st.data(),
)
@settings(max_examples=300)
def test_every_prompt_is_computed_once_in_order(
    prompts: list[tuple[int, int, bool]], budget: int, saturation: int, num_blocks: int, window: KvWindow, data: st.DataObject
) -> None:
    run = Run(budget, saturation, num_blocks, window)
    for number, (family, length, ahead) in enumerate(prompts):
        tokens = range(100 * family, 100 * family + length)
        run.arrive(run.scheduler.new_prompt(tokens, "", whole=number % 3 == 0), ahead=ahead)
        for _ in range(data.draw(st.integers(0, 3))):
            run.step()
    for _ in range(2000):
        if data.draw(st.integers(0, 9)) == 0:
            run.drop(data.draw(st.sampled_from(run.prompts)))
        plan = run.step()
        if run.held and (not plan or data.draw(st.booleans())):
            run.scheduler.release(run.held.pop(0))
        if not plan and not run.held and run.scheduler.num_waiting == 0:
            break
    assert {*run.finished, *run.dropped} == set(run.prompts)
    for prompt in run.held:
        run.scheduler.release(prompt)
    assert run.cache.num_free == num_blocks
    assert run.scheduler.num_held == 0


def test_short_prompts_share_a_step_and_long_ones_are_cut() -> None:
    scheduler = PrefillScheduler(PrefixCache(100), BLOCK_SIZE, steps_of(16))
    _, _, long, _ = added(scheduler, range(5), range(100, 111), range(200, 230), range(300, 302))
    steps = [[(c.prompt is long, c.start, c.num_tokens, c.last) for c in step(scheduler)] for _ in range(4)]
    assert steps == [
        [(False, 0, 5, True), (False, 0, 11, True)],
        [(True, 0, 16, False)],
        [(True, 16, 14, True), (False, 0, 2, True)],
        [],
    ]


def test_no_step_wants_more_logits_than_memory_is_set_aside_for() -> None:
    """Of a prompt that is scored all tokens are wanted, and of every other one the last."""
    scheduler = PrefillScheduler(PrefixCache(4000), BLOCK_SIZE, steps_of(4096))
    scheduler.add(scheduler.new_prompt(range(700), "", whole=True))
    assert [[chunk.num_tokens for chunk in step(scheduler)] for _ in range(3)] == [[256], [256], [188]]
    added(scheduler, *(range(1000 + 3 * number, 1002 + 3 * number) for number in range(300)))
    assert [len(step(scheduler)) for _ in range(2)] == [256, 44]


def test_a_long_prompt_lets_short_ones_go_before_every_other_step_to_its_end() -> None:
    scheduler = PrefillScheduler(PrefixCache(1000), BLOCK_SIZE, steps_of(16, 8))
    long, medium, short, tiny = added(scheduler, range(1600), range(2000, 2040), range(3000, 3016), range(4000, 4004))
    steps = [[chunk.prompt for chunk in step(scheduler)] for _ in range(11)]
    assert steps[0] == [long]
    assert steps[1::2] == [[short], [tiny], [medium], [medium], [medium]]
    assert steps[2::2] == [[long]] * 5
    [late] = added(scheduler, range(5000, 5010))
    assert [step(scheduler)[0].prompt for _ in range(3)] == [late, long, long], "at most a step of the long one before it"
    while long.remaining > 32:
        step(scheduler)
    [last] = added(scheduler, range(6000, 6010))
    assert [step(scheduler)[0].prompt for _ in range(3)] == [last, long, long]


def test_prompts_of_one_step_go_between_in_the_order_in_which_they_came() -> None:
    scheduler = PrefillScheduler(PrefixCache(2000), BLOCK_SIZE, steps_of(16))
    long, first = added(scheduler, range(1600), range(2000, 2016))
    step(scheduler)
    shorter = []
    for length in (15, 14, 13):
        shorter += added(scheduler, range(3000 + 100 * length, 3000 + 100 * length + length))
        assert step(scheduler)[0].prompt is [first, *shorter][len(shorter) - 1]
        assert step(scheduler)[0].prompt is long


LATER = st.tuples(st.booleans(), st.integers(1, 16))


@given(
    long_ahead=st.booleans(),
    two=st.booleans(),
    steady=st.lists(LATER, min_size=1, max_size=4),
    every=st.integers(1, 2),
    warm=st.integers(1, 12),
    short=LATER,
)
def test_neither_long_prompts_nor_short_ones_starve_while_others_keep_coming(
    long_ahead: bool, two: bool, steady: list[tuple[bool, int]], every: int, warm: int, short: tuple[bool, int]
) -> None:
    """Prompts of one step keep coming, ahead and in line. A long one has every fourth step at least, of two the one ahead.

    A short one waits for a step of each long one, and for one more of each for each step of those that go before it.
    """
    scheduler = PrefillScheduler(PrefixCache(1000), BLOCK_SIZE, steps_of(4))
    longs = [scheduler.new_prompt(range(100_000 * n, 100_000 * n + 400), "") for n in range(1 + two)]
    for number, long in enumerate(longs):
        scheduler.add(long, ahead=long_ahead if number == 0 else not long_ahead)
    arrived = 0

    def next_step() -> set[Prompt]:
        nonlocal arrived
        if arrived % every == 0:
            ahead, length = steady[arrived % len(steady)]
            prompt = scheduler.new_prompt(range(1_000_000 + 100 * arrived, 1_000_000 + 100 * arrived + length % 4 + 1), "")
            scheduler.add(prompt, ahead=ahead)
        arrived += 1
        return {chunk.prompt for chunk in step(scheduler)}

    steps = [next_step() for _ in range(warm)]
    ahead, length = short
    awaited = scheduler.new_prompt(range(5_000_000, 5_000_000 + length % 4 + 1), "")
    scheduler.add(awaited, ahead=ahead)
    steps += [next_step() for _ in range(60)]
    waited = steps[warm : next(n for n, each in enumerate(steps) if awaited in each)]
    chunks = sum(bool(each & set(longs)) for each in waited)
    assert chunks <= (1 + two) * (1 + len(waited) - chunks), "besides the one under way"
    long = longs[two and not long_ahead]
    own = [0, *(number for number, each in enumerate(steps) if long in each), len(steps)]
    assert max(later - number for number, later in pairwise(own)) <= 4


def test_prompts_of_like_length_are_computed_one_after_the_other() -> None:
    scheduler = PrefillScheduler(PrefixCache(1000), BLOCK_SIZE, steps_of(16))
    prompts = added(scheduler, *(range(1000 * n, 1000 * n + 320 - 32 * n) for n in range(4)))
    assert [step(scheduler)[0].prompt for _ in range(68)] == [p for p in prompts for _ in range(-(-len(p.token_ids) // 16))]


def test_prompts_share_a_step_up_to_its_saturation() -> None:
    scheduler = PrefillScheduler(PrefixCache(100), BLOCK_SIZE, steps_of(16, 8))
    added(scheduler, range(5), range(100, 103), range(200, 201), range(300, 312), range(400, 401))
    assert [[chunk.num_tokens for chunk in step(scheduler)] for _ in range(5)] == [[5, 3], [1], [12], [1], []]


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    scheduler = PrefillScheduler(PrefixCache(4), BLOCK_SIZE, steps_of(16))
    first, long, _ = added(scheduler, range(4), range(100, 116), range(200, 204))
    assert [chunk.prompt for chunk in step(scheduler)] == [first]
    assert step(scheduler) == [], "the long prompt waits for all four blocks, and the short one behind it"
    scheduler.release(first)
    assert [chunk.prompt for chunk in step(scheduler)] == [long]


def test_a_prompt_goes_before_one_that_is_being_computed_and_the_others_get_a_step_between_two() -> None:
    scheduler = PrefillScheduler(PrefixCache(100), BLOCK_SIZE, steps_of(16))
    long, queued = added(scheduler, range(40), range(100, 116))
    assert [chunk.prompt for chunk in step(scheduler)] == [long]
    first, second, third = (scheduler.new_prompt(range(start, start + 20), "") for start in (200, 300, 400))
    scheduler.add(first, ahead=True)
    scheduler.add(second, ahead=True)
    assert [step(scheduler)[0].prompt for _ in range(4)] == [first, first, long, second]
    scheduler.add(third, ahead=True)
    assert [step(scheduler)[0].prompt for _ in range(5)] == [second, long, third, third, queued]


def test_a_started_prompt_goes_on_while_one_ahead_of_it_finds_no_blocks() -> None:
    scheduler = PrefillScheduler(PrefixCache(6), BLOCK_SIZE, steps_of(8))
    [long] = added(scheduler, range(16))
    step(scheduler)
    ahead = scheduler.new_prompt(range(100, 112), "")
    scheduler.add(ahead, ahead=True)
    assert [(chunk.prompt, chunk.last) for chunk in step(scheduler)] == [(long, True)]
    assert step(scheduler) == [], "its KV is still to be handed over"
    scheduler.release(long)
    assert [chunk.prompt for chunk in step(scheduler)] == [ahead]


def test_a_prompt_starts_behind_what_is_cached_and_hands_it_over() -> None:
    scheduler = PrefillScheduler(PrefixCache(100), BLOCK_SIZE, steps_of(16))
    added(scheduler, range(24))
    step(scheduler)
    assert [(c.start, c.end, c.handoff_start) for c in step(scheduler)] == [(16, 24, 16)]
    added(scheduler, range(40))
    steps = [[(c.start, c.end, c.handoff_start, c.last) for c in step(scheduler)] for _ in range(2)]
    assert steps == [[(24, 32, 0, False)], [(32, 40, 32, True)]], "the first cut is at the next multiple"
    assert (scheduler.cache_queries, scheduler.cache_hits) == (64, 24)


def test_the_last_token_is_computed_into_a_block_of_its_own() -> None:
    scheduler = PrefillScheduler(PrefixCache(100), BLOCK_SIZE, steps_of(16))
    [donor] = added(scheduler, range(8))
    step(scheduler)
    [again, longer] = added(scheduler, range(8), range(9))
    assert [(c.start, c.num_tokens) for c in step(scheduler)] == [(4, 4), (8, 1)]
    assert again.block_table[0] == donor.block_table[0]
    assert again.block_table[1] != donor.block_table[1]
    assert longer.block_table[:2] == donor.block_table


def test_nothing_is_shared_before_it_is_computed_or_across_salts() -> None:
    scheduler = PrefillScheduler(PrefixCache(100), BLOCK_SIZE, steps_of(16))
    added(scheduler, range(8), range(8))
    first, second = scheduler.plan()
    assert (first.start, second.start) == (0, 0), "of two in one step, none waits for the other"
    scheduler.drop(first.prompt)
    scheduler.step_done([first, second])
    scheduler.release(first.prompt)
    scheduler.release(second.prompt)
    added(scheduler, range(9), salt="other")
    added(scheduler, range(9))
    assert [chunk.start for chunk in step(scheduler)] == [0, 8], "cached although its owner was cancelled; salts share nothing"


def test_a_step_of_a_long_prompt_touches_only_the_keys_of_its_blocks() -> None:
    scheduler = PrefillScheduler(PrefixCache(2000), BLOCK_SIZE, steps_of(16))
    [prompt] = added(scheduler, range(4000))
    step(scheduler)
    prompt.keys = keys = CountedKeys(prompt.keys)
    reads = []
    while not (plan := step(scheduler))[0].last:
        reads.append(keys.reads)
        keys.reads = 0
    assert set(reads) == {16 // BLOCK_SIZE}
    assert [chunk.end for chunk in plan] == [4000]
    assert keys.reads == len(keys), "at its end what was evicted meanwhile is known again"


def test_a_prompt_leaves_blocks_into_which_others_grow() -> None:
    growth: list[int | None] = [3]
    scheduler = PrefillScheduler(PrefixCache(6), BLOCK_SIZE, steps_of(16), lambda: growth[0])
    [prompt] = added(scheduler, range(16))
    assert step(scheduler) == [], "four blocks are too many of six"
    assert scheduler.fits(16, 2)
    assert not scheduler.fits(16, 3)
    growth[0] = None
    assert step(scheduler) == [], "somebody waits for blocks"
    growth[0] = 2
    assert [chunk.prompt for chunk in step(scheduler)] == [prompt]


def test_what_a_windowed_prompt_will_need_is_kept_for_it() -> None:
    """It holds four blocks, of ten, from its start on: it takes one for each that it gives back."""
    scheduler = PrefillScheduler(PrefixCache(7), BLOCK_SIZE, steps_of(4), window=KvWindow(8, unit=4, late=0))
    [first] = added(scheduler, range(40))
    while first.computed < 16:
        step(scheduler)
        assert first.block_table.num_owned == 4
    second = scheduler.new_prompt(range(100, 140), "")
    scheduler.add(second, ahead=True)
    computed = [step(scheduler)[0].prompt for _ in range(6)]
    assert computed == [first] * 6, "three are free, and the second one waits for four"
    scheduler.release(first)
    while step(scheduler):
        assert second.block_table.num_owned <= 4
    assert second.computed == 40


def test_a_windowed_prompt_goes_on_behind_what_is_left_of_it() -> None:
    """What lies before the window of the next token was evicted."""
    cache = PrefixCache(8)
    scheduler = PrefillScheduler(cache, BLOCK_SIZE, steps_of(8), window=KvWindow(8, unit=4, late=0))
    for tokens in (range(40), range(41)):
        [prompt] = added(scheduler, tokens)
        while step(scheduler):
            pass
        scheduler.release(prompt)
    assert cache.match(prompt.keys) == 0
    assert prompt.cached == 40
    assert cache.num_free == 8


def test_no_step_has_more_rows_of_logits_than_memory_is_set_aside_for() -> None:
    """Prompts that are scored, whose every token is such a row, with others between them."""
    scheduler = PrefillScheduler(PrefixCache(3000), BLOCK_SIZE, steps_of(2048))
    for number in range(12):
        ids = range(1000 * number, 1000 * number + 600)
        scheduler.add(scheduler.new_prompt(ids, "", whole=True))
        scheduler.add(scheduler.new_prompt(ids[:20], f"{number}"))
    computed = 0
    while plan := step(scheduler):
        assert sum(chunk.num_tokens if chunk.prompt.whole else 1 for chunk in plan) <= SAMPLED_TOKENS
        computed += sum(chunk.num_tokens for chunk in plan)
    assert computed == 12 * (600 + 20)


def test_a_scored_prompt_that_lacks_rows_lets_others_pass_that_are_not_scored() -> None:
    scheduler = PrefillScheduler(PrefixCache(3000), BLOCK_SIZE, steps_of(2048))
    first, second, small = (scheduler.new_prompt(range(size), "", whole=True) for size in (300, 240, 5))
    for prompt in (first, second, small):
        scheduler.add(prompt)
    [late] = added(scheduler, range(5000, 5020))
    plans = [[chunk.prompt for chunk in step(scheduler)] for _ in range(3)]
    assert plans == [[first], [first, late], [second, small]], "the first step has not even one row left"


def test_a_scored_prompt_of_the_line_has_its_turn_while_others_pass_it() -> None:
    """Those that were sent ahead are scored, too, and take the rows of every step that is not the line's."""
    scheduler = PrefillScheduler(PrefixCache(8000), BLOCK_SIZE, steps_of(2048))
    waiting = scheduler.new_prompt(range(200), "", whole=True)
    scheduler.add(waiting)
    plans = []
    for number in range(1, 4):
        scheduler.add(scheduler.new_prompt(range(1000 * number, 1000 * number + 200), "", whole=True), ahead=True)
        [passing] = added(scheduler, range(1000 * number + 500, 1000 * number + 520))
        plans.append([chunk.prompt for chunk in step(scheduler)])
        assert passing in plans[-1]
    assert [waiting in plan for plan in plans] == [False, True, False]


def test_what_a_started_windowed_prompt_will_need_is_not_pinned_for_others() -> None:
    """It shares what it gives back, and takes as many others."""
    cache = PrefixCache(24)
    scheduler = PrefillScheduler(cache, 2, PrefillConfig(max_batch_tokens=6), window=KvWindow(8, unit=8, late=2))
    scheduler.add(long := scheduler.new_prompt(range(100), ""))
    for _ in range(4):
        scheduler.step_done(scheduler.plan())
    scheduler.add(scheduler.new_prompt([*range(22), 999], ""))
    scheduler.step_done(scheduler.plan())
    assert scheduler.kept() > 1
    while cache.pin("fetched", 1, (), 0.0) is not None:
        assert scheduler.kept() <= cache.num_free
    while long.remaining:
        plan = scheduler.plan()
        assert plan, "it waits for a pin"
        scheduler.step_done(plan)

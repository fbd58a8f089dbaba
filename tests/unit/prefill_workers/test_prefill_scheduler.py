"""Chunks cover every prompt once, in order, within the budget; blocks are never lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_manager import BlockManager
from prefill_workers.scheduler import PrefillScheduler, Prompt

BLOCK_SIZE = 4


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    budget=st.integers(1, 32),
    num_blocks=st.integers(10, 40),
    data=st.data(),
)
@settings(max_examples=300)
def test_every_prompt_is_computed_once_in_order(lengths: list[int], budget: int, num_blocks: int, data: st.DataObject) -> None:
    blocks = BlockManager(num_blocks)
    scheduler = PrefillScheduler(blocks, BLOCK_SIZE, budget)
    prompts = [Prompt(range(length)) for length in lengths]
    for prompt in prompts:
        scheduler.add(prompt)
    computed = {id(prompt): 0 for prompt in prompts}
    finished: list[Prompt] = []
    held: list[Prompt] = []
    dropped: set[int] = set()
    for _ in range(2000):
        if data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(prompts))
            if victim not in finished and id(victim) not in dropped:
                dropped.add(id(victim))
                scheduler.drop(victim)
                scheduler.release(victim)
        plan = scheduler.plan()
        assert sum(chunk.num_tokens for chunk in plan) <= budget
        for chunk in plan:
            assert id(chunk.prompt) not in dropped
            assert chunk.start == computed[id(chunk.prompt)], "chunks follow each other without gap or overlap"
            assert chunk.num_tokens == min(budget, len(chunk.prompt.token_ids) - chunk.start), "cut alike in any company"
            assert len(chunk.prompt.block_table) * BLOCK_SIZE >= len(chunk.prompt.token_ids)
            computed[id(chunk.prompt)] += chunk.num_tokens
            assert chunk.last == (computed[id(chunk.prompt)] == len(chunk.prompt.token_ids))
            if chunk.last:
                finished.append(chunk.prompt)
                held.append(chunk.prompt)
        tables = [block for prompt in prompts for block in prompt.block_table]
        assert len(tables) == len(set(tables)), "a block has two owners"
        assert scheduler.queued_tokens == sum(
            len(p.token_ids) - computed[id(p)] for p in prompts if id(p) not in dropped and p not in finished
        )
        if held and (not plan or data.draw(st.booleans())):
            scheduler.release(held.pop(0))
        if not plan and not held and scheduler.num_waiting == 0:
            break
    assert {id(prompt) for prompt in finished} | dropped == {id(prompt) for prompt in prompts}
    starts = [prompts.index(prompt) for prompt in finished]
    assert starts == sorted(starts), "first come, first served"
    for prompt in held:
        scheduler.release(prompt)
    assert blocks.num_free == num_blocks
    assert scheduler.num_held == 0


def test_short_prompts_share_a_step_and_long_ones_are_cut() -> None:
    scheduler = PrefillScheduler(BlockManager(100), BLOCK_SIZE, 16)
    first, second, long, late = Prompt(range(5)), Prompt(range(11)), Prompt(range(30)), Prompt(range(2))
    for prompt in (first, second, long, late):
        scheduler.add(prompt)
    steps = [[(c.prompt is long, c.start, c.num_tokens, c.last) for c in scheduler.plan()] for _ in range(4)]
    assert steps == [
        [(False, 0, 5, True), (False, 0, 11, True)],
        [(True, 0, 16, False)],
        [(True, 16, 14, True), (False, 0, 2, True)],
        [],
    ]


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    blocks = BlockManager(4)
    scheduler = PrefillScheduler(blocks, BLOCK_SIZE, 16)
    first, long, short = Prompt(range(4)), Prompt(range(16)), Prompt(range(4))
    for prompt in (first, long, short):
        scheduler.add(prompt)
    assert [chunk.prompt for chunk in scheduler.plan()] == [first]
    assert scheduler.plan() == [], "the long prompt waits for all four blocks, and the short one behind it"
    scheduler.release(first)
    assert [chunk.prompt for chunk in scheduler.plan()] == [long]

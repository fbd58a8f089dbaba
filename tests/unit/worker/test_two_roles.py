"""Prompts and streams in one pool, as at a worker that has changed its role: whatever has begun comes to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model_files.kv_window import WHOLE, KvWindow
from configs.schema import PrefillConfig
from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler
from decode_workers.stream import Stream
from engine.memory.prefix_cache import PrefixCache
from prefill_workers.scheduler import PrefillScheduler, Prompt
from protocol.cache.keys import block_keys
from protocol.sampling import SamplingParams

BLOCK_SIZE = 2
SMALL = KvWindow(8, unit=8, late=2)
"""A token sees 8 to 15 before it, so that what a sequence holds goes up and down by four blocks."""


class TwoRoles:
    """Both schedulers of one worker, wired as `PrefillWorker` and `DecodeWorker` wire them."""

    def __init__(self, num_blocks: int, window: KvWindow, batch_tokens: int, chunk_tokens: int) -> None:
        quiet: Any = lambda *_: None  # noqa: E731
        self.cache = PrefixCache(num_blocks)
        self.ledger = Ledger(
            self.cache,
            BLOCK_SIZE,
            1e9,
            lambda: 0.0,
            quiet,
            quiet,
            quiet,
            window=window,
            step_tokens=chunk_tokens,
            beside=lambda shared: self.prompts.kept(shared),
        )
        self.streams = DecodeScheduler(self.ledger, 8, chunk_tokens, 1e9, lambda: 0.0)
        config = PrefillConfig(max_batch_tokens=batch_tokens)
        self.prompts = PrefillScheduler(self.cache, BLOCK_SIZE, config, self._growth, window)
        self.here: list[Prompt] = []
        self.handed_over: list[Prompt] = []
        self.ends: dict[int, int] = {}
        """At how many tokens each stream ends, by ticket."""
        self._fresh = 1_000_000

    def _growth(self) -> int | None:
        return None if self.streams.num_preempted else self.ledger.growth

    def has_room(self, prompt: Prompt) -> bool:
        growth = self._growth()
        return growth is not None and self.prompts.fits_beside(prompt, self.ledger.held_blocks, growth)

    def prompt(self, tokens: Sequence[int]) -> None:
        prompt = self.prompts.new_prompt(tokens, "")
        if self.has_room(prompt):
            self.here.append(prompt)
            self.prompts.add(prompt)

    def stream(self, tokens: Sequence[int], max_tokens: int) -> None:
        """A prompt that is computed here, and its answer."""
        if not self.ledger.blocks.fits(len(tokens), max_tokens):
            return
        entry = self.ledger.reserve(b"r", tuple(tokens), max_tokens, "", own_tokens=1)
        if entry is not None:
            assert self.streams.attached.attach_here(entry.ticket_id) is entry
            sampling = SamplingParams(seed=1, max_tokens=max_tokens)
            table = entry.block_table
            self.streams.add(Stream(entry.ticket_id, b"r", table, sampling, list(tokens), 0, entry.held_tokens))
            self.ends[entry.ticket_id] = len(tokens) + max_tokens

    def prefill_step(self) -> bool:
        plan = self.prompts.plan()
        self.prompts.step_done(plan)
        for chunk in plan:
            if chunk.last:
                self.here.remove(chunk.prompt)
                self.handed_over.append(chunk.prompt)
        return bool(plan)

    def decode_step(self) -> bool:
        batch = self.streams.plan()
        for stream in batch:
            chunk = self.streams.chunk(stream)
            self.streams.computed(stream, chunk)
            self.streams.attached.keep(stream.ticket_id, stream.token_ids, chunk.end, chunk.start)
            if chunk.end == len(stream.token_ids):
                self._fresh += 1
                stream.append(self._fresh)
            if len(stream.token_ids) >= self.ends[stream.ticket_id]:
                self.streams.remove(stream.ticket_id)
                self.ledger.release(stream.ticket_id)
                del self.ends[stream.ticket_id]
        return bool(batch)

    def hand_over(self) -> bool:
        if self.handed_over:
            self.prompts.release(self.handed_over.pop(0))
            return True
        return False

    def beat(self) -> bool:
        """Those that have not begun go back, if streams hold what they need."""
        for prompt in [p for p in self.here if not p.block_table and not self.has_room(p)]:
            self.here.remove(prompt)
            self.prompts.drop(prompt)
            return True
        return False

    def check(self) -> None:
        tables = [prompt.block_table.owned for prompt in [*self.here, *self.handed_over]]
        self.cache.check_integrity([*tables, *(entry.block_table.owned for entry in self.ledger)])
        assert self.prompts.kept() <= self.cache.num_free, "what prompts lack is there"

    def finish(self) -> None:
        """No more comes: all of it ends."""
        for _ in range(5000):
            steps = (self.prefill_step(), self.decode_step(), self.hand_over())
            self.check()
            if not (self.here or self.ends or self.handed_over):
                return
            assert any(steps) or self.beat(), "each waits for the other"
        raise AssertionError("no end")


TOKENS = st.tuples(st.integers(0, 1), st.integers(1, 70) | st.integers(40, 90))
"""A family, of which all have the same beginning, and a length."""


def tokens_of(family: int, length: int, number: int) -> list[int]:
    """Two thirds of it are the family's."""
    shared = 2 * length // 3
    return [*range(100 * family, 100 * family + shared), *range(1000 * number, 1000 * number + length - shared)]


@given(
    num_blocks=st.integers(12, 36),
    window=st.sampled_from([WHOLE, SMALL, SMALL, KvWindow(16, unit=8, late=2)]),
    batch_tokens=st.integers(2, 16),
    chunk_tokens=st.integers(2, 16),
    arrivals=st.lists(
        st.tuples(TOKENS, st.just(0) | st.integers(0, 60), st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=10
    ),
)
@settings(max_examples=400)
def test_whatever_has_begun_comes_to_its_end(
    num_blocks: int,
    window: KvWindow,
    batch_tokens: int,
    chunk_tokens: int,
    arrivals: list[tuple[tuple[int, int], int, int, int]],
) -> None:
    """`arrivals`: tokens, those of the answer, or a prompt for others, and how many steps of each role go by then."""
    worker = TwoRoles(num_blocks, window, batch_tokens, chunk_tokens)
    for number, ((family, length), answer, prefills, decodes) in enumerate(arrivals, 1):
        tokens = tokens_of(family, length, number)
        if answer:
            worker.stream(tokens, answer)
        elif worker.prompts.fits(length):
            worker.prompt(tokens)
        for _ in range(prefills):
            worker.prefill_step()
            worker.check()
        for _ in range(decodes):
            worker.decode_step()
            worker.check()
    worker.finish()
    assert worker.cache.num_free == num_blocks


def test_blocks_that_streams_share_leave_room_for_prompts() -> None:
    worker = TwoRoles(400, WHOLE, 16, 16)
    common = range(40 * BLOCK_SIZE)
    for number in range(9):
        worker.stream([*common, 1000 + number], 100)
        for _ in range(6):
            worker.decode_step()  # the first computes what is common by then
    assert len(worker.ends) == 9
    assert len(worker.ledger.held_blocks) == sum(entry.block_table.num_owned for entry in worker.ledger) - 8 * 40
    assert worker.has_room(worker.prompts.new_prompt(range(9000, 9000 + 200 * BLOCK_SIZE), ""))


def test_a_prompt_shares_what_streams_hold_of_its_beginning() -> None:
    worker = TwoRoles(100, WHOLE, 16, 16)
    chat = range(60 * BLOCK_SIZE)
    worker.stream([*chat, 999], 20)
    for _ in range(8):
        assert worker.decode_step()
    assert worker.ends, "it goes on"
    assert worker.ledger.held_blocks >= worker.cache.blocks_of(block_keys(chat, BLOCK_SIZE, ""))
    longer = [*chat, *range(2000, 2000 + 30 * BLOCK_SIZE)]
    assert worker.has_room(worker.prompts.new_prompt(longer, ""))
    assert not worker.has_room(worker.prompts.new_prompt(longer[1:], "")), "it begins in another way"


def test_streams_that_share_a_window_will_once_hold_blocks_of_their_own() -> None:
    worker = TwoRoles(400, KvWindow(64, unit=8, late=2), 16, 16)
    common = range(60 * BLOCK_SIZE)
    for number in range(6):
        worker.stream([*common, 1000 + number], 200)
        for _ in range(9):
            worker.decode_step()  # the first computes what is common by then
    promised = worker.ledger.growth + len(worker.ledger.held_blocks)
    most = 0
    while worker.decode_step():
        most = max(most, len(worker.ledger.held_blocks))
    assert most <= promised
    assert promised == 6 * worker.ledger.blocks.at_once(60 * BLOCK_SIZE + 1 + 200), "and none counts twice"


@pytest.mark.parametrize("batch_tokens", [3, 5, 6, 7])
@pytest.mark.parametrize("late", range(0, 30, 3))
def test_a_prompt_that_has_begun_and_the_oldest_stream_do_not_wait_for_each_other(batch_tokens: int, late: int) -> None:
    """The prompt is let in while the stream has just given blocks back, which it soon wants again."""
    for num_blocks in range(16, 34):
        worker = TwoRoles(num_blocks, SMALL, batch_tokens, 4)
        worker.stream(range(5), 90)
        for _ in range(late):
            worker.decode_step()
        if worker.prompts.fits(120):
            worker.prompt(range(1000, 1120))
        worker.finish()


@pytest.mark.parametrize("held", [30, 60])
def test_sharing_a_prompt_that_is_there_as_a_whole_is_not_dearer(held: int) -> None:
    """A long prompt waits to be handed over. Others begin as it does, and are too short to give anything back."""
    started = []
    for window in (WHOLE, KvWindow(256, unit=8, late=2)):
        worker = TwoRoles(100, window, 16, 4)
        common = range(2 * held)
        worker.prompt([*common, 999])
        while worker.here:
            assert worker.prefill_step()
        for number in range(1, 8):
            worker.prompt([*common, *range(1000 * number, 1000 * number + 5)])
        while worker.prefill_step():
            worker.check()
        started.append(len(worker.handed_over))
    assert started == [8, 8]


@pytest.mark.parametrize("num_blocks", range(12, 30))
@pytest.mark.parametrize("steps", range(2, 6))
@pytest.mark.parametrize("beside", ["stream", "prompt", "short prompt"])
def test_who_takes_blocks_of_a_prompt_leaves_it_as_many(num_blocks: int, steps: int, beside: str) -> None:
    """What the prompt gives back then goes to nobody, and it needs another block for each. They are taken or refused."""
    worker = TwoRoles(num_blocks, SMALL, 6, 4)
    tokens = list(range(100))
    worker.prompt(tokens)
    for _ in range(steps):
        assert worker.prefill_step()
    alike = [*tokens[: 6 * steps - 1], 999]
    if beside == "stream":
        worker.stream(alike, 60)
    else:
        worker.prompt([*alike, *range(1000, 1050)] if beside == "prompt" else alike)
    for _ in range(40):
        worker.check()
        worker.decode_step()  # as far as it comes without a step of the prompt
    worker.check()
    worker.finish()


def test_what_a_prompt_lacks_is_what_others_share_of_it() -> None:
    worker = TwoRoles(24, SMALL, 6, 4)
    tokens = list(range(100))
    worker.prompt(tokens)
    for _ in range(4):
        assert worker.prefill_step()
    assert worker.prompts.kept() == 0
    worker.stream([*tokens[:22], 999], 60)
    assert len(worker.ends) == 1
    assert worker.prompts.kept() == 7, "the blocks from token 8 to 22"
    worker.finish()

"""Which tokens the next prefill step computes. Pure Python.

    QUEUED ──blocks given──► COMPUTING ──last chunk──► HELD (until its KV has been handed over) ──► gone

First come, first served: a step takes up to `max_batch_tokens` tokens of the oldest prompt, and prompts behind it only while
all together have at most `saturation_tokens`. From there on a step takes as long as its tokens are many, so that who shared it
would only wait for each other (DistServe's L_m: Zhong et al., OSDI 2024, section 3.1). A prompt is cut at multiples of
`max_batch_tokens` whatever else is there: where the cuts are decides how sums are rounded, and a request's tokens shall not
depend on its company. A prompt gets all its blocks when it starts; while there are too few, it and those behind it that have
none wait, so that a long prompt is never starved by short ones.

Where all layers of the model have a sliding window, a prompt gets as many blocks as it needs at a time. From then on it takes
one for each that it gives back. A block that is shared goes to nobody when it is given back, so for each of these another one
stays free (`kept`). So a prompt that has started waits for no other prompt, and for no stream.

A prompt of more than eight steps is long, and does not hold up short ones. Every other of its turns goes to prompts behind it
that need a single step, in their order. If there are none, it goes to the shortest that needs at most eight steps, and at most
a quarter of what the long one still needs (`configs.arithmetic.goes_between`). So a prompt of one step waits for two steps of a
long one, the one under way among them, and for one more for each step of those that go before it. What needs more steps may
wait until the long one is done.

The router may send a prompt ahead of others, also of one that is being computed. Between two prompts that went ahead, the
others get a step, which may be one between two of a long one, so they are never starved either. A long prompt is never passed
in two turns one after the other: it has every other turn of its kind, those ahead or the others. That is every other step, and
every fourth at least while prompts of one step keep coming, both ahead and in line.

A prompt starts behind the blocks that the prefix cache has of it, and is first cut at the next such multiple. Its last token
is always computed, for its logits, and into a block of its own, for a shared block is never written. What a step has computed
enters the cache when the step is over (`step_done`), whatever becomes of the prompt then; of two like prompts in flight, none
waits for the other.

A scored prompt wants the logits of all its tokens. While a step has too little memory for them, prompts behind it go on that
are not scored. No other scored prompt passes it.

Who frees: `release`, called by the worker once no step and no transfer reads the blocks any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from configs.arithmetic import ceil_div, goes_between, turn_between
from configs.model_files.kv_window import WHOLE, KvWindow
from configs.schema import SAMPLED_TOKENS, PrefillConfig
from engine.memory.block_table import BlockTable, BlockTables
from engine.memory.prefix_cache import PrefixCache
from protocol.cache.keys import block_keys
from protocol.messages.load import NOTHING_BROUGHT, Brought


@dataclass(eq=False)
class Prompt:
    """One prompt on its way through this worker."""

    token_ids: Sequence[int]
    keys: Sequence[bytes]
    """Keys of its full blocks for the prefix cache."""
    whole: bool = False
    """Whether all of it is computed, whatever is cached, because the logits of each token are wanted."""
    block_table: BlockTable = field(default_factory=BlockTable)
    """Its blocks, in order. Empty while the prompt is queued."""
    cached: int = 0
    """Number of leading tokens whose KV was cached when the prompt started."""
    computed: int = 0
    """Number of leading tokens whose KV is in the pool, or will be after the current step."""
    brought: Brought = NOTHING_BROUGHT
    """What came into the pool for it before it was queued."""
    likely_cached: int = 0
    """Number of leading tokens that were cached when the prompt was queued."""

    passed: bool = False
    """Whether its latest turn went to shorter ones, so that the next one is its own."""

    def usable_keys(self, block_size: int) -> Sequence[bytes]:
        """Keys of the blocks that need not be computed if they are cached: the last token always is, for its logits."""
        return () if self.whole else self.keys[: (len(self.token_ids) - 1) // block_size]

    @property
    def remaining(self) -> int:
        """Number of tokens that no step has computed or is computing, as far as is known while the prompt is queued."""
        return len(self.token_ids) - (self.computed if self.block_table else self.likely_cached)


@dataclass(frozen=True)
class PlannedChunk:
    """Tokens [start, start + num_tokens) of a prompt. `last` tells that the first token of the answer is sampled from it."""

    prompt: Prompt
    start: int
    num_tokens: int
    last: bool

    @property
    def handoff_start(self) -> int:
        """Position at which the KV begins that this chunk adds to the handoff: what was cached goes with the first chunk."""
        return 0 if self.start == self.prompt.cached else self.start

    @property
    def end(self) -> int:
        """Position behind the chunk's last token."""
        return self.start + self.num_tokens


class PrefillScheduler:
    """Decides which parts of which prompts each step computes, in the order of their arrival."""

    def __init__(
        self,
        cache: PrefixCache,
        block_size: int,
        config: PrefillConfig,
        growth: Callable[[], int | None] = lambda: 0,
        window: KvWindow = WHOLE,
    ) -> None:
        """`growth` says how many blocks a prompt that starts leaves free for others; None: none starts now. `window` is what a
        token sees."""
        self._growth = growth
        self._cache = cache
        cache.promised = self.kept
        self.window = window
        self._tables = BlockTables(cache, block_size, window, config.batch_tokens)
        self._block_size = block_size
        self._max_batch_tokens = config.batch_tokens
        self._shared_tokens = config.shared_tokens
        self._line: list[Prompt] = []
        """Prompts that were not sent ahead, queued and computing, in their order."""
        self._ahead: list[Prompt] = []
        """Prompts that were sent ahead of those in line, queued and computing, in their order."""
        self._line_is_next = False
        """The latest prompt that went ahead is computed, and no prompt of the line had a step since."""
        self._held = 0
        self.cache_queries = 0
        """Tokens of the prompts that were started."""
        self.cache_hits = 0
        """Those of them that were cached."""
        self.brought = NOTHING_BROUGHT
        """Those of these that came from elsewhere."""

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens not yet computed, and not cached either when their prompt came."""
        return sum(prompt.remaining for prompt in self._ahead + self._line)

    @property
    def num_waiting(self) -> int:
        """Number of prompts that are queued or computed in part."""
        return len(self._ahead) + len(self._line)

    @property
    def num_held(self) -> int:
        """Number of prompts that hold blocks."""
        return self._held

    def kept(self, shared: Sequence[bytes] = ()) -> int:
        """Blocks that have to stay free for prompts that have started, if others take the cached blocks of `shared` as well."""
        if not self._tables.windowed:
            return 0
        return sum(self._lacks(prompt, shared) for prompt in self._line + self._ahead)

    def fits(self, num_tokens: int, others: int = 0) -> bool:
        """Whether a prompt of this many tokens can ever be computed here while `others` have so many of the blocks."""
        return self._tables.at_once(num_tokens) <= self._cache.num_blocks - others

    def fits_beside(self, prompt: Prompt, held: Set[int], growth: int) -> bool:
        """Whether a queued prompt gets its blocks when no other prompt has any: beside `growth` blocks, and those that are
        `held`, of which it shares what is cached of its beginning.
        """
        hit = self._tables.match(prompt.usable_keys(self._block_size))
        first, length, whole = self._extent(prompt, hit)
        shared = self._cache.blocks_of(prompt.keys[first:hit] if length == whole else ())  # else it needs others later
        return self.fits(len(prompt.token_ids), growth + len(held - shared))

    def new_prompt(self, token_ids: Sequence[int], cache_salt: str, *, whole: bool = False) -> Prompt:
        """Make a prompt to `add`. It shares KV only with prompts of the same salt, and takes none from others if `whole`."""
        assert self.fits(len(token_ids)), "too long for this pool: refuse it on arrival"
        return Prompt(token_ids, block_keys(token_ids, self._block_size, cache_salt), whole)

    def add(self, prompt: Prompt, *, ahead: bool = False) -> None:
        """Queue a prompt behind all others, or `ahead` of those that were not sent ahead themselves."""
        prompt.likely_cached = self._tables.match(prompt.usable_keys(self._block_size)) * self._block_size
        (self._ahead if ahead else self._line).append(prompt)

    def plan(self) -> list[PlannedChunk]:
        """The chunks of the next step: one of at most `max_batch_tokens` tokens, or several of at most `saturation_tokens` in
        all, with at most SAMPLED_TOKENS rows of logits.

        Counts their tokens as computed.
        """
        chunks: list[PlannedChunk] = []
        room, rows = self._max_batch_tokens, SAMPLED_TOKENS
        in_turn = 0
        blocks_lack = rows_lack = False
        order = self._in_order()
        between = self._between(order)
        for prompt in between + [each for each in order if each not in between] if between else order:
            if blocks_lack and not prompt.block_table:
                continue
            hit = 0 if prompt.block_table else self._tables.match(prompt.usable_keys(self._block_size))
            start = prompt.computed or hit * self._block_size
            most = min(self._max_batch_tokens, SAMPLED_TOKENS) if prompt.whole else self._max_batch_tokens
            num_tokens = min(most - start % most, len(prompt.token_ids) - start)
            if num_tokens > room or not rows:
                break
            if prompt.whole and (rows_lack or num_tokens > rows):
                rows_lack = True  # those behind it that are not scored want one row each
                continue
            if not self._has_blocks(prompt, start + num_tokens) if prompt.block_table else not self._start(prompt, hit):
                blocks_lack = True  # what would free them may be behind it
                continue
            room, rows = min(room, self._shared_tokens) - num_tokens, rows - (num_tokens if prompt.whole else 1)
            prompt.computed = start + num_tokens
            chunks.append(PlannedChunk(prompt, start, num_tokens, last=prompt.remaining == 0))
            in_turn += not rows_lack
        self._cache.lacking = blocks_lack
        if between and chunks:
            order[0].passed = True
        for chunk in chunks:
            chunk.prompt.passed = False
        self._count(chunks[:in_turn])  # to pass a scored prompt is no turn of the line, in which that one is first
        return chunks

    def step_done(self, plan: Sequence[PlannedChunk]) -> None:
        """Record that the KV of these chunks is in the pool. Their full blocks can be shared from now on."""
        for chunk in plan:
            prompt = chunk.prompt
            first = 0 if chunk.last else chunk.start // self._block_size  # with the last chunk what was evicted meanwhile, too
            self._tables.insert(prompt.block_table, prompt.keys, first, chunk.end // self._block_size)

    def drop(self, prompt: Prompt) -> None:
        """Plan no more of this prompt. Its blocks stay until `release`. Idempotent."""
        for prompts in (self._line, self._ahead):
            if prompt in prompts:
                prompts.remove(prompt)

    def release(self, prompt: Prompt) -> None:
        """Give a dropped prompt's blocks back: nothing reads or writes them any more. Idempotent."""
        assert prompt not in self._line + self._ahead, "drop it first"
        if prompt.block_table:
            self._tables.release(prompt.block_table, prompt.keys)
            prompt.block_table = BlockTable()
            self._held -= 1

    def _in_order(self) -> list[Prompt]:
        return self._line + self._ahead if self._line_is_next else self._ahead + self._line

    def _between(self, order: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that go before the first one in this step, although it is being computed (`turn_between`).

        In the line's turn these are of the line, too.
        """
        if not order or not order[0].block_table or order[0].passed:
            return []
        first, others = order[0], self._line[1:] if self._line_is_next and self._line else order[1:]
        length, left, step_tokens = len(first.token_ids), first.remaining, self._max_batch_tokens
        between = (each for each in others if goes_between(each.remaining, length, step_tokens, left=left))
        return sorted(between, key=lambda each: turn_between(each.remaining, step_tokens))

    def _count(self, chunks: Sequence[PlannedChunk]) -> None:
        """Whose turn it is after these chunks, and who is still to be computed."""
        if any(chunk.prompt in self._line for chunk in chunks):
            self._line_is_next = False
        elif any(chunk.last for chunk in chunks):
            self._line_is_next = True
        self._line = [prompt for prompt in self._line if prompt.remaining]
        self._ahead = [prompt for prompt in self._ahead if prompt.remaining]

    def _start(self, prompt: Prompt, hit: int) -> bool:
        """Give the prompt its blocks, of which the first `hit` are cached; False if there are too few."""
        first, length, whole = self._extent(prompt, hit)
        cached, growth = prompt.keys[first:hit], self._growth()
        if growth is None:
            return False
        cost = self._tables.cost(first, length, cached)
        later = 0 if length == whole else length - first - cost  # what it gives back of what it shares is no other block
        if cost + later + self.kept(cached) > self._cache.num_free - growth:
            return False
        block_table = self._tables.new(first, length, cached)
        assert block_table is not None, "there are as many"
        prompt.block_table = block_table
        prompt.cached = hit * self._block_size
        self._held += 1
        self.cache_queries += len(prompt.token_ids)
        self.cache_hits += prompt.cached
        if prompt.cached >= prompt.brought.num_tokens:
            self.brought += prompt.brought
        return True

    def _extent(self, prompt: Prompt, hit: int) -> tuple[int, int, int]:
        """Where a prompt's table begins if its first `hit` blocks are cached, how long it is then, and how long in the end."""
        first, whole = self._tables.first_block(hit * self._block_size), ceil_div(len(prompt.token_ids), self._block_size)
        return first, min(whole, first + self._tables.at_once(len(prompt.token_ids))), whole

    def _lacks(self, prompt: Prompt, shared: Sequence[bytes]) -> int:
        """The most blocks that a started prompt will take beside those that are its alone, what it gives back among them."""
        table, whole = prompt.block_table, ceil_div(len(prompt.token_ids), self._block_size)
        if not table or len(table) == whole:
            return 0
        return min(self._tables.at_once(len(prompt.token_ids)), whole - table.first) - self._cache.num_sole(table.owned, shared)

    def _has_blocks(self, prompt: Prompt, end: int) -> bool:
        """Whether a prompt that was started has blocks for its tokens up to `end`. What no later token sees is given back, and
        as many others are taken.
        """
        table, num_tokens = prompt.block_table, len(prompt.token_ids)
        self._tables.give_up(table, self._tables.first_block(prompt.computed), prompt.keys)
        most = min(ceil_div(num_tokens, self._block_size), table.first + self._tables.at_once(num_tokens))
        return self._tables.lengthen(table, most) or self._tables.lengthen(table, ceil_div(end, self._block_size))

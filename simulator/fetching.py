"""A prompt's beginning that lies elsewhere comes into a simulated worker's pool, as `prefill_workers.fetching` brings it.

    prompt ──► its turn ──► from the node's memory ──► from another worker's pool ──► queued
                                 └── pinned, with fresh blocks behind ──► filled ──► cached, unpinned

Prompts that wait for nothing are computed meanwhile. Whoever lends blocks pins them, and sends them in pieces by a link that
all its loans share. Handoffs take what they take without loans (`Profile.handoff_s`): they are not held up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.memory.prefix_cache import Pin, PrefixCache
from prefill_workers.scheduler import Prompt
from protocol.messages.load import MEMORY, PEER, Brought
from simulator.clock import Clock
from simulator.profile import Profile
from simulator.shared import MemoryTier, Site

MOST_AT_ONCE = 4
"""Prompts of one worker that are brought at once, as in `prefill_workers.fetching`."""
MOST_LOANS, MOST_SHARE = 16, 0.5
"""Fetches that one worker serves at once, as in `kv_transfer.fetching.lender`."""
PIECE_TOKENS = 2048
"""Tokens that are sent at once, as in `kv_transfer.sender`."""


class Link:
    """What carries one worker's KV, one piece after the other."""

    def __init__(self, clock: Clock, token_s: float) -> None:
        """A token takes `token_s` seconds."""
        self._clock = clock
        self._token_s = token_s
        self._free_at = 0.0

    def send(self, num_tokens: int, on_over: Callable[..., None], *args: Any) -> None:
        """Call `on_over` when so many tokens are over, behind all that was sent before."""
        self._free_at = max(self._clock.now, self._free_at) + num_tokens * self._token_s
        self._clock.at(self._free_at, on_over, *args)


@dataclass(eq=False)
class _Loan:
    keys: Sequence[bytes]
    pin: Pin
    sent: int
    """Leading tokens that are at the borrower."""
    end: int
    answer: Callable[[int], None]


class Lender:
    """Sends one worker's cached blocks to others. `settle` brings its books up to date before they are looked at, and `changed`
    is called when blocks were pinned or given back.
    """

    def __init__(self, site: Site, cache: PrefixCache, settle: Callable[[], None], changed: Callable[[], None]) -> None:
        self._clock = site.clock
        self._profile: Profile = site.profile
        self._block_size = site.config.block_size
        self._cache = cache
        self._settle = settle
        self._changed = changed
        self._link = Link(site.clock, site.profile.overheads.handoff_token_s)
        self._loans = 0
        self.lent_tokens = 0
        """Tokens whose KV was sent since the start."""

    def ask(self, keys: Sequence[bytes], held: int, answer: Callable[[int], None]) -> None:
        """Take a question for all but the first `held` of these blocks. `answer` is called at the borrower with the number of
        leading blocks that it has by then; they are no more than before if nothing was sent."""
        self._settle()
        num_blocks = self._cache.match(keys)
        if self._loans == MOST_LOANS or num_blocks <= held:
            self._clock.after(self._profile.overheads.message_s, answer, held)
            return
        keys = keys[:num_blocks]
        pin = self._cache.pin("lent", num_blocks, keys, self._clock.now, most=MOST_SHARE)
        if pin is None:
            self._clock.after(self._profile.overheads.message_s, answer, held)
            return
        self._loans += 1
        self._changed()
        self._push(_Loan(keys, pin, held * self._block_size, num_blocks * self._block_size, answer))

    def _push(self, loan: _Loan) -> None:
        """What was sent so far is there."""
        size = min(PIECE_TOKENS, loan.end - loan.sent)
        if not size:
            self._clock.after(self._profile.overheads.handoff_s, self._over, loan)
            return
        loan.sent += size
        self.lent_tokens += size
        self._link.send(size, self._push, loan)

    def _over(self, loan: _Loan) -> None:
        self._loans -= 1
        self._settle()
        self._cache.unpin(loan.pin, loan.keys)
        self._changed()
        self._clock.after(self._profile.overheads.message_s, loan.answer, len(loan.keys))


@dataclass(frozen=True)
class Wanted:
    """Whose blocks are to be fetched, and how many tokens of the prompt's beginning are there as far as the router knows."""

    lender: Lender
    num_tokens: int


@dataclass(frozen=True, eq=False)
class _Order:
    prompt: Prompt
    wanted: Wanted | None
    then: Callable[[], None]


@dataclass(frozen=True, eq=False)
class _Filling:
    """Blocks of the pool that are being filled from one source."""

    order: _Order
    source: str
    keys: Sequence[bytes]
    held: int
    """Leading blocks that were there before."""
    pin: Pin
    began: float


class Fetching:
    """What one prefill worker brings into its pool; `tier` is that of its node, if there is one."""

    def __init__(self, site: Site, cache: PrefixCache, own: Lender, tier: MemoryTier | None) -> None:
        self._clock = site.clock
        self._message_s = site.profile.overheads.message_s
        self._block_size = site.config.block_size
        self._cache = cache
        self._own = own
        self._tier = tier
        self._reading = None if tier is None else Link(site.clock, tier.token_s)
        self._line: deque[_Order] = deque()
        self._at_once = 0

    def bring(self, prompt: Prompt, wanted: Wanted | None, then: Callable[[], None]) -> None:
        """Fill the pool with as much of a prompt's beginning as can be had, note it in the prompt, and call `then`."""
        if wanted is None and self._tier is None:
            then()
            return
        self._line.append(_Order(prompt, wanted, then))
        self._take_next()

    def _take_next(self) -> None:
        while self._line and self._at_once < MOST_AT_ONCE:
            self._at_once += 1
            self._read(self._line.popleft())

    def _read(self, order: _Order) -> None:
        """Read what the node's memory has, and fetch the rest."""
        if self._tier is None or self._reading is None:
            self._fetch(order)
            return
        keys = self._usable(order)
        held = self._cache.match(keys)
        filling = self._pinned(order, MEMORY, keys, held, held + self._tier.match(keys[held:]))
        if filling is None:
            self._fetch(order)
            return
        self._tier.put(filling.keys)
        num_tokens = (len(filling.keys) - held) * self._block_size
        self._reading.send(num_tokens, self._have_read, filling)

    def _have_read(self, filling: _Filling) -> None:
        self._filled(filling, len(filling.keys))
        self._fetch(filling.order)

    def _fetch(self, order: _Order) -> None:
        wanted, keys = order.wanted, self._usable(order)
        held = self._cache.match(keys)
        if wanted is None or wanted.lender is self._own:
            filling = None
        else:
            filling = self._pinned(order, PEER, keys, held, min(len(keys), wanted.num_tokens // self._block_size))
        if wanted is None or filling is None:
            self._over(order)
            return
        self._clock.after(
            self._message_s, wanted.lender.ask, filling.keys, held, lambda blocks: self._have_fetched(filling, blocks)
        )

    def _have_fetched(self, filling: _Filling, num_blocks: int) -> None:
        self._filled(filling, num_blocks)
        self._over(filling.order)

    def _usable(self, order: _Order) -> Sequence[bytes]:
        return order.prompt.usable_keys(self._block_size)

    def _pinned(self, order: _Order, source: str, keys: Sequence[bytes], held: int, end: int) -> _Filling | None:
        """Blocks for the first `end` keys; None if there are too few, or none of them is missing."""
        now = self._clock.now
        pin = self._cache.pin("fetched", end, keys[:held], now) if end > held else None
        return None if pin is None else _Filling(order, source, keys[:end], held, pin, now)

    def _filled(self, filling: _Filling, num_blocks: int) -> None:
        """So many of the leading blocks hold what they should."""
        keys = filling.keys[:num_blocks]
        self._cache.insert(keys, filling.pin.table)
        self._cache.unpin(filling.pin, keys)
        if num_blocks > filling.held:
            num_tokens = (num_blocks - filling.held) * self._block_size
            filling.order.prompt.brought += Brought.of(filling.source, num_tokens, self._clock.now - filling.began)

    def _over(self, order: _Order) -> None:
        self._at_once -= 1
        order.then()
        self._clock.after(0.0, self._take_next)

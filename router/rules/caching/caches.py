"""What this router knows of the workers' prefix caches: it asks each worker, and follows what it tells. Pure.

link up ──CacheAsk──► all that is held ──► changes, number by number ──► link lost: nothing is known of the worker
             ▲                                     │
             └──────────────── a gap ──────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from protocol.cache.keys import SHORT_BYTES
from protocol.cache.news import MOST_KEYS, CacheAsk, CacheNews
from protocol.messages.workers import WorkerLife
from router.rules.caching.cache_index import CacheIndex, Held

_FRESH_S = 0.1
"""A request that waits looks at the index again after so many seconds."""


OnNews = Callable[[int, int, int], None]
"""Is called with a message's number of keys, then with the blocks and the bytes of the whole index."""
OnAge = Callable[[float], None]
"""Is called with the age of the index, in seconds."""


class Caches:
    """The index of one router, and who fills it."""

    def __init__(
        self, index: CacheIndex | None = None, on_news: OnNews = lambda *_: None, on_age: OnAge = lambda _: None
    ) -> None:
        """`on_news` hears of every message that counts, and `on_age` of the index's age while it is not 0, and of its end."""
        self._index = index or CacheIndex()
        self._on_news = on_news
        self._on_age = on_age
        self._followers: dict[str, CacheFollower] = {}
        self._asked_at: dict[str, float] = {}
        """When workers were asked that have not told all of it yet, in the order in which they were."""

    @property
    def num_blocks(self) -> int:
        """Blocks that some worker holds."""
        return self._index.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes that the index takes."""
        return self._index.num_bytes

    def held(self, keys: Sequence[bytes]) -> Held:
        """Return how many leading blocks of these keys each worker holds, as far as is known."""
        return self._index.held(keys)

    def age(self, now: float) -> float:
        """Seconds since the index was whole: since the first question that is not answered in full; 0 if all of them are."""
        return next((max(0.0, now - asked_at) for asked_at in self._asked_at.values()), 0.0)

    def beat(self, now: float) -> None:
        """Tell the age of an index that is not whole."""
        if self._asked_at:
            self._on_age(self.age(now))

    def follow(self, life: WorkerLife, tell: Callable[[CacheAsk], None], now: float) -> CacheFollower:
        """Follow this life of a worker, which `tell` sends messages to, and ask for all that it holds."""
        self._index.drop(life.worker_id)
        follower = self._followers[life.worker_id] = CacheFollower(life, self, tell)
        self._asked_at.pop(life.worker_id, None)
        follower.ask(now)
        return follower

    def asked(self, follower: CacheFollower, now: float) -> None:
        """Note that a worker was asked for all that it holds. If an earlier question is unanswered, its moment counts."""
        if self._followers.get(follower.life.worker_id) is follower:
            self._asked_at.setdefault(follower.life.worker_id, now)

    def changed(self, follower: CacheFollower, news: CacheNews, now: float) -> None:
        """Take over what a worker tells, unless another life of it is followed by now."""
        worker_id = follower.life.worker_id
        if self._followers.get(worker_id) is not follower:
            return
        if news.begins:
            self._index.drop(worker_id)
        if news.gained:
            self._index.gained(worker_id, news.gained)
        if news.lost:
            self._index.lost(worker_id, news.lost)
        num_keys = (len(news.gained) + len(news.lost)) // SHORT_BYTES
        self._on_news(num_keys, self.num_blocks, self.num_bytes)
        if not news.left:
            self._whole(worker_id, now)

    def leave(self, follower: CacheFollower, now: float) -> None:
        """Forget what this life of a worker held."""
        worker_id = follower.life.worker_id
        if self._followers.get(worker_id) is follower:
            del self._followers[worker_id]
            self._index.drop(worker_id)
            self._whole(worker_id, now)

    def _whole(self, worker_id: str, now: float) -> None:
        """Nothing is missing of this worker any more."""
        if self._asked_at.pop(worker_id, None) is not None:
            self._on_age(self.age(now))


class CacheFollower:
    """The news of one life of one worker, in their order."""

    def __init__(self, life: WorkerLife, caches: Caches, tell: Callable[[CacheAsk], None]) -> None:
        self.life = life
        self._caches = caches
        self._tell = tell
        self._number: int | None = None
        """Of the latest news; None while all that is held was asked for."""
        self._left = 0
        """Parts of all that is held which are still to come."""

    def ask(self, now: float) -> None:
        """Ask for all that the worker holds."""
        self._number = None
        self._caches.asked(self, now)
        self._tell(CacheAsk())

    def hear(self, news: CacheNews, now: float) -> None:
        """Take the next message. One that is malformed, or of another life, counts as if it had not come."""
        size = len(news.gained) + len(news.lost)
        if (news.worker_id, news.epoch) != self.life or size > MOST_KEYS * SHORT_BYTES:
            return
        if len(news.gained) % SHORT_BYTES or len(news.lost) % SHORT_BYTES:
            return
        if self._number is None and not news.begins:
            return  # from before the question
        expected = (self._number, self._left - 1) if self._left else ((self._number or 0) + 1, 0)
        if not news.begins and (news.number, news.left) != expected:
            self.ask(now)
            return
        self._number, self._left = news.number, news.left
        self._caches.changed(self, news, now)

    def leave(self, now: float) -> None:
        """Forget what the worker holds, because its link is lost."""
        self._caches.leave(self, now)


class CachedParts(Mapping[str, int]):
    """How many tokens of one prompt workers hold, by worker, who holds the most first, while it looks for workers."""

    def __init__(
        self, caches: Caches, keys: Sequence[bytes], block_size: int, expected: Mapping[str, int] | None = None
    ) -> None:
        """`keys` are those of the prompt's blocks of `block_size` tokens. `expected` are blocks that workers will hold soon,
        though they have not told so (`router.rules.caching.kin`).
        """
        self.keys_of_prompt = keys
        self._caches = caches
        self._block_size = block_size
        self._expected = expected or {}
        self._told: dict[str, int] = {}
        self._held: Mapping[str, int] = {}
        self._all: Mapping[str, int] = {}
        """Held and expected."""
        self._looked_at = -math.inf

    @property
    def lendable(self) -> Mapping[str, int]:
        """What workers have told that they hold, in tokens, who holds the most first."""
        return _InTokens(self._held, self._block_size)

    def look(self, now: float) -> None:
        """Ask the index, unless that was done `_FRESH_S` ago at most."""
        if now - self._looked_at <= _FRESH_S:
            return
        self._looked_at = now
        self._held = self._all = self._caches.held(self.keys_of_prompt)
        more = {name: blocks for name, blocks in self._expected.items() if blocks > self._held.get(name, 0)}
        if more:
            self._all = dict(sorted((dict(self._held) | more).items(), key=lambda item: -item[1]))

    def told(self, worker_id: str, tokens: int) -> None:
        """Note what a decode worker itself has said, as far as it is less than was known."""
        if tokens < self.get(worker_id):
            self._told[worker_id] = tokens

    def get(self, worker_id: str, default: int = 0) -> int:  # type: ignore[override]
        """The number of tokens that a worker holds."""
        tokens = self._all.get(worker_id, default) * self._block_size
        return min(tokens, self._told.get(worker_id, tokens)) if self._told else tokens

    def __getitem__(self, worker_id: str) -> int:
        return self._all[worker_id] * self._block_size

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


class _InTokens(Mapping[str, int]):
    """Numbers of blocks, as tokens."""

    def __init__(self, blocks: Mapping[str, int], block_size: int) -> None:
        self._blocks = blocks
        self._block_size = block_size

    def __getitem__(self, worker_id: str) -> int:
        return self._blocks[worker_id] * self._block_size

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

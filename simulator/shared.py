"""What the workers of a simulated cluster share: clock and profile, and caches beside those of their own.

MemoryTier    of a node: what its workers' prompts and streams release, read again at a given pace
OneCache      the ideal: one cache as large as all pools together; what any worker computes, every worker has at once
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from configs.schema import ClusterConfig
from engine.memory.prefix_cache import PrefixCache
from protocol.cache.news import CacheNews
from protocol.messages.load import LoadReport
from protocol.messages.workers import Role
from simulator.clock import Clock
from simulator.profile import Profile
from simulator.telling import Busyness, News


@dataclass(frozen=True)
class TierSize:
    """A memory tier on each node."""

    num_tokens: int
    """Tokens whose KV the tier of one node holds."""
    token_s: float
    """Seconds that a worker takes to read the KV of one token."""
    num_nodes: int = 1
    """Worker n of each role is on node n modulo this number."""


@dataclass(frozen=True)
class Caching:
    """What caches can do, besides what `ClusterConfig.routing` says about the choice of workers."""

    fetch: bool = True
    """Prefill workers fetch blocks from other workers' pools where routers say so, as they do with `routing: cache`."""
    tier: TierSize | None = None
    one_cache: bool = False
    """All workers share one cache, without any cost: for comparison, the most that caches could do."""
    one_cache_tokens: int | None = None
    """Size of that cache. None: that of all pools together."""


DEFAULT_CACHING = Caching()
"""Caching of a cluster without tiers."""


class MemoryTier:
    """Blocks that a node's memory holds for all of its workers. Those that were used the longest ago give way.

    Writing takes no time.
    """

    def __init__(self, num_blocks: int, token_s: float) -> None:
        self.token_s = token_s
        """Seconds that reading the KV of one token takes."""
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys whose blocks are all here."""
        return next((count for count, key in enumerate(keys) if key not in self._blocks), len(keys))

    def put(self, keys: Sequence[bytes]) -> None:
        """Note that a prompt with these blocks was used. The end of it gives way before its beginning."""
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


class OneCache:
    """One prefix cache that prefill workers use as their own, and that decode workers read and fill without any cost."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = PrefixCache(num_blocks)
        self.wakes: list[Callable[[], None]] = []
        """Called when blocks were given back that another worker may wait for."""

    def gained(self, key: bytes, cached: bool) -> None:
        """Note that a decode worker has cached this block, which then is here, too."""
        if cached and not self.blocks.match((key,)) and (table := self.blocks.allocate(1, ())) is not None:
            self.blocks.insert((key,), table)
            self.blocks.release((key,), table)

    def used(self, keys: Sequence[bytes]) -> None:
        """Note that a stream with these blocks is over: they are the last to give way, and of them the beginning."""
        keys = keys[: self.blocks.match(keys)]
        if (table := self.blocks.allocate(len(keys), keys)) is not None:
            self.blocks.release(keys, table)

    def copy_to(self, cache: PrefixCache, keys: Sequence[bytes]) -> None:
        """Let a worker's own cache have what this one has of a prompt, as far as there is room."""
        held, end = cache.match(keys), self.blocks.match(keys)
        if end > held and (table := cache.allocate(end, keys[:held])) is not None:
            cache.insert(keys[:end], table)
            cache.release(keys[:end], table)

    def released(self) -> None:
        """Wake the workers that wait for blocks."""
        for wake in self.wakes:
            wake()


class PartsOfOne(Mapping[str, int]):
    """How many tokens of a prompt each worker has where all have the same cache: equally many."""

    def __init__(self, cache: OneCache, keys: Sequence[bytes], block_size: int, worker_ids: Sequence[str]) -> None:
        self._cache = cache
        self._keys = keys
        self._block_size = block_size
        self._worker_ids = worker_ids
        self._tokens = 0

    def look(self, now: float) -> None:
        """Find out how much of the prompt the cache holds now."""
        self._tokens = self._cache.blocks.match(self._keys) * self._block_size

    def told(self, worker_id: str, tokens: int) -> None:
        """A worker had less room than the cache has blocks: that is no news."""

    def __getitem__(self, worker_id: str) -> int:
        return self._tokens

    def __iter__(self) -> Iterator[str]:
        return iter(self._worker_ids if self._tokens else ())

    def __len__(self) -> int:
        return len(self._worker_ids) if self._tokens else 0


@dataclass(frozen=True)
class Site:
    """What all workers and routers of one simulated cluster have in common."""

    config: ClusterConfig
    profile: Profile
    clock: Clock
    busyness: Mapping[Role, Busyness]
    """Each worker tells its role's when it computes, and asks the other's."""
    report: Callable[[LoadReport], None]
    """Takes the workers' load reports to the routers."""
    beat: Callable[[LoadReport], None] | None
    """Takes reports that say nothing new but how long steps take; None if nobody asks."""
    tell: Callable[[CacheNews], None] | None
    """Takes what their caches gain and lose to the routers; None if nobody asks."""
    one_cache: OneCache | None = None

    def news(self, worker_id: str) -> News | None:
        """What tells of one worker's cache; None if nobody asks."""
        return None if self.tell is None else News(worker_id, self.clock, self.tell)

"""A whole cluster in virtual time: requests in, ended requests out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle

from configs.schema import ClusterConfig
from protocol.cache.news import CacheNews
from protocol.messages.load import LoadReport
from protocol.messages.workers import Role
from simulator.clock import Clock
from simulator.decode import DecodeWorker
from simulator.prefill import PrefillWorker
from simulator.profile import Profile
from simulator.request import Request
from simulator.router import Router
from simulator.shared import DEFAULT_CACHING, Caching, MemoryTier, OneCache, Site, TierSize
from simulator.telling import Busyness


@dataclass(frozen=True, order=True)
class Shape:
    """How many workers of each role, printed as 2P3D. A colocated cluster has no prefill workers, and is printed as 3D."""

    prefill: int
    decode: int

    def __post_init__(self) -> None:
        assert self.prefill >= 0, "a number of workers"
        assert self.decode > 0, "somebody decodes"

    @property
    def workers(self) -> int:
        """Workers of both roles together."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode}D"


class Cluster:
    """A cluster that serves requests once, by `run`. `on_end` is told of each request when it has ended."""

    def __init__(
        self,
        shape: Shape,
        config: ClusterConfig,
        profile: Profile,
        on_end: Callable[[Request], None],
        *,
        caching: Caching = DEFAULT_CACHING,
        one_by_one: bool = False,
    ) -> None:
        """Requests go to the routers of `http.router_replicas` in turn. The shape has prefill workers exactly where the
        configuration lets prompts be computed there (`disaggregation` is not never). `one_by_one`: each decode step is an event
        of its own, which is slow."""
        assert (shape.prefill > 0) == (config.disaggregation != "never"), "prefill workers are there to be used"
        by_cache = config.routing == "cache"
        assert by_cache or not caching.one_cache, "one cache for all is of use where it is asked"
        self.clock = clock = Clock()
        self._message_s = profile.overheads.message_s
        self._one_cache = _one_cache(shape, config, caching) if caching.one_cache else None
        busyness = {Role.PREFILL: Busyness(clock, shape.prefill), Role.DECODE: Busyness(clock, shape.decode)}
        tell = self._tell if by_cache and self._one_cache is None else None
        beat = self._beat if by_cache else None
        site = Site(config, profile, clock, busyness, self._report, beat, tell, self._one_cache)
        tiers = _tiers(config, caching.tier)
        self.prefills = [PrefillWorker(f"prefill-{n}", site, tiers[n % len(tiers)]) for n in range(shape.prefill)]
        self.decodes = [
            DecodeWorker(f"decode-{n}", site, tiers[n % len(tiers)], one_by_one=one_by_one) for n in range(shape.decode)
        ]
        self.routers = [
            Router(site, self.prefills, self.decodes, on_end, fetch=caching.fetch) for _ in range(config.http.router_replicas)
        ]
        self._next_router = cycle(self.routers)

    def run(self, requests: Iterable[Request]) -> None:
        """Serve requests until all of them have ended. They come in the order of their arrival, and are taken one at a time."""
        self._requests = iter(requests)
        for prefill in self.prefills:
            prefill.start()
        for decode in self.decodes:
            decode.start()
        self._await_next()
        self.clock.run()

    def check_integrity(self) -> None:
        """Assert that no block is lost on any worker."""
        if self._one_cache is None:
            for prefill in self.prefills:
                prefill.check_integrity()
        else:
            self._one_cache.blocks.check_integrity(table for prefill in self.prefills for table in prefill.tables)
        for decode in self.decodes:
            decode.check_integrity()

    def _await_next(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self.clock.at(request.arrival, self._arrive, request)

    def _arrive(self, request: Request) -> None:
        self._await_next()
        next(self._next_router).arrive(request)

    def _report(self, report: LoadReport) -> None:
        self.clock.after(self._message_s, self._reported, report)

    def _reported(self, report: LoadReport) -> None:
        for router in self.routers:
            router.report(report)

    def _beat(self, report: LoadReport) -> None:
        self.clock.after(self._message_s, self._beaten, report)

    def _beaten(self, report: LoadReport) -> None:
        for router in self.routers:
            router.beat(report)

    def _tell(self, news: CacheNews) -> None:
        self.clock.after(self._message_s, self._told, news)

    def _told(self, news: CacheNews) -> None:
        for router in self.routers:
            router.hear(news)


def _one_cache(shape: Shape, config: ClusterConfig, caching: Caching) -> OneCache:
    """A cache for all workers."""
    assert caching.tier is None, "one cache for all has no need of a tier"
    all_tokens = shape.prefill * config.prefill.kv_cache_tokens + shape.decode * config.decode.kv_cache_tokens
    return OneCache((caching.one_cache_tokens or all_tokens) // config.block_size)


def _tiers(config: ClusterConfig, size: TierSize | None) -> Sequence[MemoryTier | None]:
    """The tier of each node; without tiers, nobody's business is which node that is."""
    if size is None:
        return [None]
    return [MemoryTier(size.num_tokens // config.block_size, size.token_s) for _ in range(size.num_nodes)]


def simulate(
    requests: Iterable[Request],
    shape: Shape,
    config: ClusterConfig,
    profile: Profile,
    caching: Caching = DEFAULT_CACHING,
) -> list[Request]:
    """Simulate a cluster that serves these requests. Returns all of them in the order in which they ended."""
    ended: list[Request] = []
    cluster = Cluster(shape, config, profile, ended.append, caching=caching)
    cluster.run(requests)
    return ended

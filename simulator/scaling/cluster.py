"""A simulated cluster whose pools size themselves, or are sized by any other rule.

    tick (each second) ──► what routers saw ──► Sizer ──► sizes ──► flips, starts, drains

A worker that is wanted joins after the time of a start, or of a flip where another role gives one up. One that is no longer
wanted gets no more requests, and ends what it has; a real one gives its streams away, which is sooner. A worker that flips
begins with an empty cache here; a real one keeps what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoscaler.limits import Sizes
from autoscaler.scaler import Present
from configs.schema import ClusterConfig
from protocol.cluster_view import RouterObservation, WorkerSeen
from protocol.messages.workers import Role
from router.rules.demand import DemandCounter, seen
from simulator.cluster import Cluster, Shape
from simulator.decode import DecodeWorker
from simulator.prefill import PrefillWorker
from simulator.profile import Profile
from simulator.request import Request
from simulator.scaling.sizers import Sizer

TICK_S = 1.0
_SPARE = 2
"""Workers of a role that may end what they have while as many as ever are wanted, in parts of these."""


@dataclass(frozen=True)
class Delays:
    """Seconds until a worker takes requests."""

    start_s: float
    flip_s: float = 1.0


@dataclass(frozen=True)
class Sized:
    """What became of the requests, and what it took."""

    requests: list[Request]
    worker_s: float
    """Seconds of workers, from their start to their end."""
    changes: list[tuple[float, Sizes]]
    """Sizes by the time from which they were wanted."""

    def turns(self, role: Role) -> int:
        """How often a size went up after it had gone down, or down after it had gone up."""
        sizes = [sizes[role] for _, sizes in self.changes]
        steps = [after - before for before, after in pairwise(sizes) if after != before]
        return sum((one > 0) != (other > 0) for one, other in pairwise(steps))


class ScaledCluster:
    """One cluster that serves requests once, by `run`."""

    def __init__(
        self, first: Shape, most: Shape, config: ClusterConfig, profile: Profile, sizer: Sizer, delays: Delays
    ) -> None:
        """`first` are the sizes to begin with, `most` those that there ever are."""
        self._config = config
        self._sizer = sizer
        self._delays = delays
        self._counter = DemandCounter(config.autoscale.ttft_s, config.autoscale.tpot_s)
        self._requests: list[Request] = []
        self._taking = True
        self._arrived = 0
        shape = Shape(_SPARE * most.prefill, _SPARE * most.decode)
        self._cluster = Cluster(shape, config, profile, self._ended)
        self._clock = self._cluster.clock
        self._of_role: dict[Role, Sequence[PrefillWorker | DecodeWorker]] = {
            Role.PREFILL: self._cluster.prefills,
            Role.DECODE: self._cluster.decodes,
        }
        wanted = {Role.PREFILL: first.prefill, Role.DECODE: first.decode}
        self._wanted = {role: workers for role, workers in wanted.items() if self._of_role[role]}
        self._up: dict[Role, list[str]] = {role: [] for role in self._wanted}
        self._coming: dict[Role, list[object]] = {role: [] for role in self._wanted}
        """A token for each start that is under way, the oldest first."""
        self._leaving: dict[str, PrefillWorker | DecodeWorker] = {}
        self._worker_s = 0.0
        self.changes: list[tuple[float, Sizes]] = [(0.0, dict(self._wanted))]

    def run(self, requests: Iterable[Request]) -> Sized:
        """Serve requests until all of them have ended."""
        for role, workers in self._of_role.items():
            for index, worker in enumerate(workers):
                if index < self._wanted.get(role, 0):
                    self._up[role].append(worker.worker_id)
                else:
                    for router in self._cluster.routers:
                        router.leave(worker.worker_id)
        self._clock.at(0.0, self._tick)
        self._cluster.run(self._counted(requests))
        return Sized(self._requests, self._worker_s, self.changes)

    def check_integrity(self) -> None:
        """Assert that no block is lost on any worker."""
        self._cluster.check_integrity()

    def _counted(self, requests: Iterable[Request]) -> Iterable[Request]:
        """The requests as they come. One is taken from here when the one before it arrives."""
        for request in requests:
            self._arrived += 1
            self._clock.at(request.arrival, self._counter.arrived, len(request.token_ids))
            yield request
        self._taking = False

    def _ended(self, request: Request) -> None:
        self._requests.append(request)
        if request.error is None:
            self._counter.first_token(request.ttft_s, len(request.token_ids))
            self._counter.ended(request.output_len, request.last_at - request.first_at)

    def _tick(self) -> None:
        now = self._clock.now
        self._leaving = {worker_id: worker for worker_id, worker in self._leaving.items() if not worker.idle}
        self._worker_s += TICK_S * (sum(self._wanted.values()) + len(self._leaving))
        ready = {role: len(up) for role, up in self._up.items()}
        start_s = self._delays.start_s
        sizes = self._sizer.sizes(self._observation(), Present(dict(self._wanted), ready, start_s), now)
        if sizes is not None and dict(sizes) != self._wanted:
            self._scale(sizes)
        if self._taking or len(self._requests) < self._arrived:
            self._clock.after(TICK_S, self._tick)

    def _observation(self) -> RouterObservation:
        router = self._cluster.routers[0]
        workers: list[WorkerSeen] = []
        for role, up in self._up.items():
            reports = (router.load_of(worker_id) for worker_id in up)
            workers += [seen(report, role, self._config.block_size) for report in reports if report is not None]
        waiting = sum(each.num_waiting for each in self._cluster.routers)
        return RouterObservation("router-0", self._counter.counts, waiting, tuple(workers))

    def _scale(self, sizes: Sizes) -> None:
        surplus = {role: self._wanted[role] - sizes[role] for role in self._wanted}
        flips = min(max(0, max(surplus.values())), max(0, -min(surplus.values())))
        for role, workers in surplus.items():
            for _ in range(workers):  # fewer than before
                self._let_go(role)
            for index in range(-workers):
                start = object()
                self._coming[role].append(start)
                self._clock.after(self._delays.flip_s if index < flips else self._delays.start_s, self._come, role, start)
        self._wanted = dict(sizes)
        self.changes.append((self._clock.now, dict(sizes)))

    def _come(self, role: Role, start: object) -> None:
        if start not in self._coming[role]:
            return  # it was called off
        taken = {*self._up[role], *self._leaving}
        worker = next((each for each in self._of_role[role] if each.worker_id not in taken), None)
        if worker is None:  # all of those that go still end what they have
            self._clock.after(TICK_S, self._come, role, start)
            return
        self._coming[role].remove(start)
        self._up[role].append(worker.worker_id)
        for router in self._cluster.routers:
            router.join(worker.worker_id)

    def _let_go(self, role: Role) -> None:
        if self._coming[role]:
            self._coming[role].pop()
            return
        worker_id = self._up[role].pop()
        self._leaving[worker_id] = next(each for each in self._of_role[role] if each.worker_id == worker_id)
        for router in self._cluster.routers:
            router.leave(worker_id)

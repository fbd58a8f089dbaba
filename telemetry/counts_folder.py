"""The counts of all routers of a node, in files: whoever is asked reads them all, and no count ends with its router.

    a router takes the lowest free place, router-0 ──► counts into the files of its place ──► ends, however it does
                                ▲                                                                    │ the place is free
                                └── its successor goes on counting where it has ended ◄──────────────┘

A place is a lock, which the kernel frees with its process. So a name stands for one router at a time, and there are as many
names as there were routers at once. The files are those of prometheus_client's multiprocess mode: what was counted is there
the moment it was, also if the process is killed in the next. The lock's own file says whether its router serves yet: so the
places also tell how many routers there are.

Whoever takes a place, or reads, removes the gauges of routers that have ended: these tell of a state, not of a past.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Counter, values
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

_LOCKS = "*.lock"
_READY = b"ready\n"
"""What the lock of a router that serves has in it."""
_KINDS = ("counter", "histogram", "gauge_livesum")
"""What prometheus_client calls the files of a place by."""
_ROOM_BYTES = 1 << 20
"""Of each file: a few thousand counts. One that outgrows it is doubled by prometheus_client."""
_TRIES, _AGAIN_S = 3, 0.01
"""A reader holds the lock of a free place for some microseconds, which must not make a second place of it."""


class CountsReader(Collector):
    """A folder of counts, for who only reads it."""

    def __init__(self, folder: Path) -> None:
        """The folder has to be there when it is read."""
        self._folder = folder

    def num_ready(self) -> int:
        """Number of routers that have a place here and serve."""
        return sum(path.stat().st_size > 0 for path in _taken(self._folder))

    def collect(self) -> Iterator[Metric]:
        """What all routers have counted that ever had a place here, and the gauges of those that have one now."""
        for path in self._folder.glob(_LOCKS):
            # Shared: whoever counts the places meanwhile must not take this one for a router's.
            if (lock := _locked(path, fcntl.LOCK_SH)) is not None:
                with contextlib.suppress(FileNotFoundError):  # another reader has removed it in between
                    mark_process_dead(path.stem, str(self._folder))
                os.close(lock)
        yield from MultiProcessCollector(None, str(self._folder)).collect()


class CountsFolder(CountsReader):
    """A folder of counts in which this process has a place, for the rest of its life. There can be one in a process."""

    def __init__(self, folder: Path, node: str = "") -> None:
        """Take a place. From now on, all of prometheus_client's metrics of this process are counted in its files.

        `node` is part of the places' names, where routers of several nodes count. Raises OSError if the folder can't be used.
        """
        super().__init__(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.place, self._lock = _taken_place(folder, f"router-{node}-" if node else "router-")
        mark_process_dead(self.place, str(folder))
        _make_room(folder, self.place)
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        # As uWSGI's users are told to do it (prometheus_client's documentation, multiprocess mode).
        values.ValueClass = values.MultiProcessValue(lambda: self.place)

    def note_ready(self) -> None:
        """Note that the router at this place serves from now on."""
        os.write(self._lock, _READY)

    def values_of(self, family: Counter, label: str) -> set[str]:
        """The values of a label that this place has counted under in a family."""
        (described,) = family.describe()
        return {
            sample.labels[label]
            for found in self.collect()
            if found.name == described.name
            for sample in found.samples
            if sample.labels["router"] == self.place
        }


def num_places(folder: Path) -> int:
    """Number of routers that have a place in the folder: all that run, also those that start or end."""
    return len(_taken(folder))


def _make_room(folder: Path, place: str) -> None:
    """Have the disk give the files of a place their room now. Raises OSError if it is full.

    They are mapped into memory: a disk that is full when such a page is first written ends the process (SIGBUS).
    """
    for kind in _KINDS:
        file = os.open(folder / f"{kind}_{place}.db", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, _ROOM_BYTES)
        finally:
            os.close(file)


def _taken(folder: Path) -> list[Path]:
    """The locks that somebody holds."""
    found = []
    for path in folder.glob(_LOCKS):
        if (lock := _locked(path, fcntl.LOCK_SH)) is None:
            found.append(path)
        else:
            os.close(lock)
    return found


def _taken_place(folder: Path, prefix: str) -> tuple[str, int]:
    """The name of the lowest free place, and the descriptor that holds its lock."""
    number = 0
    while True:
        path = folder / f"{prefix}{number}.lock"
        for attempt in range(_TRIES):
            if (lock := _locked(path)) is not None:
                os.ftruncate(lock, 0)
                return path.stem, lock
            if attempt + 1 < _TRIES:
                time.sleep(_AGAIN_S)
        number += 1


def _locked(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """The descriptor of a file whose lock is free, which holds it now."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor

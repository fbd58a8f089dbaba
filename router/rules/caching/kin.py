"""Prompts that clients say belong together (`prompt_cache_key`): where the latest of them went. Pure.

What a worker has cached it tells when a prompt is computed. Requests that come together, or one upon the other, are faster than
that. So a request with a name is compared with the latest one of the same name: what both begin with will lie where that went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.cache.keys import SHORT_BYTES, shortened

_MOST_NAMES = 1024
_MOST_BLOCKS = 1024
"""Blocks of a prompt that are compared."""
_KNOWN_S = 60.0
"""For so long a name is known. What was computed before that is told by workers."""


@dataclass(frozen=True)
class _Latest:
    keys: bytes
    workers: tuple[str, ...]
    at: float


class Kin:
    """The names of one router. Times are on any monotonic clock."""

    def __init__(self) -> None:
        self._latest: dict[str, _Latest] = {}
        """By name, the one that was used longest ago first."""

    def __len__(self) -> int:
        return len(self._latest)

    def placed(self, name: str, keys: Sequence[bytes], workers: tuple[str, ...], now: float) -> None:
        """Note that a prompt of this name with blocks of these keys went to these workers."""
        self._latest.pop(name, None)
        self._latest[name] = _Latest(shortened(keys[:_MOST_BLOCKS]), workers, now)
        if len(self._latest) > _MOST_NAMES:
            del self._latest[next(iter(self._latest))]

    def expected(self, name: str, keys: Sequence[bytes], now: float) -> Mapping[str, int]:
        """How many leading blocks of these keys workers will hold, as the latest prompt of this name begins with them."""
        latest = self._latest.get(name)
        if latest is None or now - latest.at > _KNOWN_S:
            return {}
        count = 0
        for count, key in enumerate(keys[:_MOST_BLOCKS]):
            if latest.keys[count * SHORT_BYTES : (count + 1) * SHORT_BYTES] != key[:SHORT_BYTES]:
                break
        else:
            count = min(len(keys), _MOST_BLOCKS)
        return dict.fromkeys(latest.workers, count) if count else {}

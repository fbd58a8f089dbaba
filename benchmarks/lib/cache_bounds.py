"""How many prompt tokens of a trace the best cache could have: pure, from the hashes of its blocks.

Requests are looked at in the order of their arrival, each as if the one before had been computed and cached at once. A cache
that all share and that forgets nothing is the upper bound of any. One of a given size gives back what was used the longest ago,
as the workers' caches do.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.datasets import TraceRow

BLOCK_TOKENS = 512
"""Tokens that a hash of Mooncake's traces stands for."""


@dataclass
class _Cache:
    """One cache of so many blocks; None is any number."""

    size: int | None
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def hits(self, hash_ids: Sequence[int]) -> int:
        """Leading blocks that are there."""
        return next((place for place, each in enumerate(hash_ids) if each not in self.blocks), len(hash_ids))

    def take(self, hash_ids: Sequence[int]) -> None:
        """Note that these blocks were used, the last one first, and make room for them."""
        for each in reversed(hash_ids):
            self.blocks[each] = None
            self.blocks.move_to_end(each)
        while self.size is not None and len(self.blocks) > self.size:
            self.blocks.popitem(last=False)


def hit_share(rows: Sequence[TraceRow], tokens: int | None, num_caches: int = 1, seed: int = 0) -> float:
    """Share of the prompt tokens that were cached, with `num_caches` caches of so many tokens each; requests go to them at
    random. A prompt's last token counts as not cached: it is always computed.
    """
    caches = [_Cache(None if tokens is None else tokens // BLOCK_TOKENS) for _ in range(num_caches)]
    rng = random.Random(seed)
    hits = total = 0
    for row in rows:
        cache = rng.choice(caches)
        hits += min(cache.hits(row.hash_ids) * BLOCK_TOKENS, row.input_len - 1)
        total += row.input_len
        cache.take(row.hash_ids)
    return hits / total

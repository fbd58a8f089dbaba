"""How many drafts of which stream a step verifies: as many as let it make the most tokens per second. Pure.

A step of B streams makes B tokens in T(B). With R further rows it makes B + sum of the chances of their drafts in T(B + R). A
stream's i-th draft is right if all before it are, with chance**i. The best drafts are taken first, whosever they are; R is the
one for which tokens by time are the most, and 0 unless that is `MARGIN` more than without drafts. Where a step is full of
streams, rows are dear, and nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace

MARGIN = 0.03
"""What drafts must bring at least, as a part of the tokens by time without them."""


def draft_counts(
    chances: Sequence[float], lengths: Sequence[int], num_rows: int, most: int, seconds: Callable[[int], float]
) -> list[int]:
    """Return how many drafts of each stream are verified, at most `most` together.

    `chances` are those of a single draft, `lengths` the numbers of drafts that there are, of some of the streams that have the
    step's `num_rows` rows. `seconds` is what a step of so many rows takes, in any unit; more rows take no less.
    """
    counts = [0] * len(chances)
    heap = [(-chance, 1, stream) for stream, chance in enumerate(chances) if lengths[stream]]
    heapify(heap)
    expected, taken = float(num_rows), list[int]()
    best, chosen = expected / seconds(num_rows) * (1 + MARGIN), 0
    most = min(most, sum(lengths))
    while len(taken) < most:
        loss, place, stream = heap[0]
        took = seconds(num_rows + len(taken) + 1)
        if expected - loss * (most - len(taken)) <= best * took:
            break  # nor would all the others pay, if they were as good as this one and cost nothing
        expected -= loss
        taken.append(stream)
        if expected > best * took:
            best, chosen = expected / took, len(taken)
        if place < lengths[stream]:
            heapreplace(heap, (-(chances[stream] ** (place + 1)), place + 1, stream))
        else:
            heappop(heap)
    for stream in taken[:chosen]:
        counts[stream] += 1
    return counts

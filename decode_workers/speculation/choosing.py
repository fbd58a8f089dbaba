"""How many drafts of which stream a step verifies: as many as let it make the most tokens per second. Pure.

A step of B streams makes B tokens in T(B). With R further rows it makes B + sum of the chances of their drafts in T(B + R). A
stream's i-th draft is right if all before it are, with chance**i. The best drafts are taken first, whosever they are; R is the
one for which tokens by time are the most, and 0 unless that is `MARGIN` more than without drafts. Where a step is full of
streams, rows are dear, and nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARGIN = 0.03
"""What drafts must bring at least, as a part of the tokens by time without them."""


def draft_counts(
    chances: Sequence[float], lengths: Sequence[int], num_rows: int, most: int, seconds: Callable[[int], float]
) -> list[int]:
    """Return how many drafts of each stream are verified, at most `most` together.

    `chances` are those of a single draft, `lengths` the numbers of drafts that there are, of some of the streams that have the
    step's `num_rows` rows. `seconds` is what a step of so many rows takes, in any unit.
    """
    ranked = sorted(
        (-(chance**place), place, stream)
        for stream, (chance, length) in enumerate(zip(chances, lengths, strict=True))
        for place in range(1, length + 1)
    )
    best, chosen, expected = num_rows / seconds(num_rows) * (1 + MARGIN), 0, float(num_rows)
    for more, (loss, _, _) in enumerate(ranked[:most], start=1):
        expected -= loss
        rate = expected / seconds(num_rows + more)
        if rate > best:
            best, chosen = rate, more
    counts = [0] * len(chances)
    for _, _, stream in ranked[:chosen]:
        counts[stream] += 1
    return counts

"""How long a worker waits between two of its lives."""

from __future__ import annotations

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
_MOST_DOUBLINGS = 5
"""So often doubled, the first pause is as long as the longest."""
STEADY_S = 30.0
"""Seconds for which a worker must have been READY, so that its end counts as an accident and not as one more of a row."""
RESUMPTION_S = 3.0
"""Seconds from a worker's death to the start of its replacement, if others of its pool are READY.

These take up its streams, and on a machine that they share a start would take the processor from them just then.
"""


def pause_s(quick_ends: int, *, spares_others: bool) -> float:
    """Return the seconds before the next life of a worker that was lost, with so many lives in a row that ended soon.

    `spares_others`: it was READY, and others that are so take up its streams now.
    """
    # One end may be an accident (the node went away meanwhile); only a row of them is worth waiting for.
    doublings = min(quick_ends - 2, _MOST_DOUBLINGS)
    seconds = min(FIRST_RETRY_S * 2.0**doublings, MAX_RETRY_S) if quick_ends >= 2 else 0.0
    return max(RESUMPTION_S, seconds) if spares_others else seconds

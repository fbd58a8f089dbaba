"""When workers leave nodes that will go. Pure; all times are seconds since 1970.

    told ──► READY, while another one starts elsewhere ──► DRAINING ──► gone, or ended at `end_by`
               └ until there is one for it, or until `drain_by`; the only one of its role stays until `end_by`

A worker that still takes requests while its replacement starts costs nothing: its streams move later. A worker that is ended
before its node has its streams resumed at once, where a node that vanishes lets them wait for a lease.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

_WAIT_SHARE = 0.5
"""Share of the time from the notice to the node's end for which a worker waits for its replacement."""
_MARGIN_S = 5.0
_MARGIN_SHARE = 0.2
"""A worker is ended this many seconds before its node, or this share of the notice before it, whichever is shorter."""


@dataclass(frozen=True)
class Leaving:
    """What was said of a node that will go."""

    told_at: float
    leaves_at: float
    """Time at which the node is gone, in seconds since 1970."""

    @property
    def notice_s(self) -> float:
        """Seconds between the two; 0 for a node that should be gone already."""
        return max(0.0, self.leaves_at - self.told_at)

    @property
    def drain_by(self) -> float:
        """When a worker there drains at the latest if another one of its role is ready elsewhere."""
        return self.told_at + self.notice_s * _WAIT_SHARE

    @property
    def end_by(self) -> float:
        """When a worker there is ended for certain, whatever it still has."""
        return self.told_at + self.notice_s - min(_MARGIN_S, self.notice_s * _MARGIN_SHARE)

    def in_words(self, no_room: str | None = None) -> str:
        """What is to be said of a worker there; `no_room` is why no other one begins in its place."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.leaves_at))
        return f"its node leaves at {when} UTC" + (f", and no other has room: {no_room}" if no_room else "")


def which_drain(
    going: Sequence[Leaving], num_staying: int, desired: int, now: float, *, num_starting: int, others_ready: int = 0
) -> list[bool]:
    """Whether each of these READY workers of one role drains now. They are in the order in which they should.

    `num_staying` others of the role are READY on nodes that stay, `num_starting` will be, and `desired` are wanted. Where that
    is more than all these, there is no room for the rest, and nobody waits for it. `others_ready` serve in their place though
    they count for another number that is wanted.
    """
    surplus = num_staying + len(going) - desired
    drains = []
    for number, leaving in enumerate(going):
        late = number < len(going) - num_starting or now >= leaving.drain_by
        drains.append(number < surplus or (num_staying + others_ready > 0 and late))
    return drains

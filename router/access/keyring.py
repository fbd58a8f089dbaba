"""Keeps the file of API keys in memory, and reads it again when it has changed.

The file is replaced as a whole (cluster/commands/lib/key_file.py), so looking at its inode, size and time before each request
is enough to see every change, and costs two microseconds. A file that has become unreadable or wrong changes nothing: the log
says so, and the keys that were good stay good until it is mended.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from configs.schema import TierConfig
from protocol.errors import ConfigError
from router.access.callers import Caller
from router.access.keys import ApiKey, check_key, read_key_file

log = logging.getLogger(__name__)

_Version = tuple[int, int, int] | None


class Keyring:
    """The API keys that are good now, by id, and the caller that each stands for."""

    def __init__(self, path: Path, tiers: dict[str, TierConfig]) -> None:
        """Read the file. Raises ConfigError if it can't be read, or if a key is of a tier that `tiers` lacks."""
        self._path = path
        self._tiers = tiers
        self._seen = self._version()
        self._keys = self._read()

    def caller(self, given: str) -> Caller:
        """Return the caller whose key a client gave. Raises AuthenticationError if the key is not good now."""
        self._refresh()
        key_id, key = check_key(self._keys, given, datetime.now(UTC))
        return Caller(key.tenant, key.tier, self._tiers[key.tier], key_id, key)

    def known_id(self, given: str) -> str | None:
        """Return the id in what a client gave, if there is a key of this id, whether or not the secret is right."""
        key_id = given.partition("-")[2].partition("-")[0]
        return key_id if key_id in self._keys else None

    def _refresh(self) -> None:
        version = self._version()
        if version == self._seen:
            return
        self._seen = version
        try:
            self._keys = self._read()
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error.message)
        else:
            log.info("read %d API keys", len(self._keys))

    def _read(self) -> dict[str, ApiKey]:
        keys = read_key_file(self._path).keys
        for key_id, key in keys.items():
            if key.tier not in self._tiers:
                problem = f"the key {key_id} is of tier {key.tier!r}, but the configuration has {', '.join(self._tiers)}"
                raise ConfigError(f"{self._path}: {problem}", param="http.keys_file")
        return keys

    def _version(self) -> _Version:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

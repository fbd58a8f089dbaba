"""Keeps the file of API keys in memory, and reads it again when it has changed.

The file is replaced as a whole (cluster/commands/lib/key_file.py), so looking at its inode, size and times before each request
is enough to see every change, and costs two microseconds. A new owner or mode is a change, too: it may make a file readable.

An entry that is wrong is skipped, and its key refused; all other entries count, revocations among them. A file that can't be
read at all changes nothing: the keys that were good stay good until it is mended, and it is tried again each second. Log,
metrics and status tell of both.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from configs.schema import TierConfig
from protocol.errors import ConfigError
from router.access.callers import Caller
from router.access.keys import ApiKey, KeyFile, check_key, read_key_file

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""Seconds after which a file that could not be read is tried again."""

_Version = tuple[int, int, int, int] | None


@dataclass(frozen=True)
class KeyringState:
    """What was last read from the file of API keys, for operators."""

    num_keys: int
    """Entries that count, revoked and expired ones among them."""
    skipped: Mapping[str, str]
    """Id of each entry that is skipped, and what is wrong with it."""
    problem: str | None
    """Why the file can't be read as it is now; the keys are those that it had before. None if it was read."""


class Keyring:
    """The API keys that are good now, by id, and the caller that each stands for."""

    def __init__(self, path: Path, tiers: Mapping[str, TierConfig], *, has_usage_log: bool = False) -> None:
        """Read the file. Raises ConfigError if it can't be read; entries that are wrong are skipped.

        Without a usage log nobody counts the tokens of a month: `has_usage_log` False makes each key with such a budget wrong.
        """
        self._has_usage_log = has_usage_log
        self._path = path
        self._tiers = tiers
        self._seen = self._version()
        self._file = self._read()
        self._problem: str | None = None
        self._again_at = 0.0

    def caller(self, given: str) -> Caller:
        """Return the caller whose key a client gave. Raises AuthenticationError if the key is not good now."""
        self._refresh()
        key_id, key = check_key(self._file.keys, given, datetime.now(UTC))
        return Caller(key.tenant, key.tier, self._tiers[key.tier], key_id, key)

    def known_id(self, given: str) -> str | None:
        """Return the id in what a client gave, if there is a key of this id, whether or not the secret is right."""
        key_id = given.partition("-")[2].partition("-")[0]
        return key_id if key_id in self._file.keys else None

    def state(self) -> KeyringState:
        """Return what the file says now."""
        self._refresh()
        return KeyringState(len(self._file.keys), self._file.skipped, self._problem)

    def _refresh(self) -> None:
        version = self._version()
        if version == self._seen and (self._problem is None or time.monotonic() < self._again_at):
            return
        self._seen = version
        try:
            self._file = self._read()
        except ConfigError as error:
            if error.message != self._problem:
                log.error("the API keys stay as they were: %s", error.message)
            self._problem, self._again_at = error.message, time.monotonic() + _AGAIN_S
        else:
            self._problem = None
            log.info("read %d API keys", len(self._file.keys))

    def _read(self) -> KeyFile:
        file = read_key_file(self._path)
        keys: dict[str, ApiKey] = {}
        skipped = dict(file.skipped)
        for key_id, key in file.keys.items():
            if key.tier not in self._tiers:
                skipped[key_id] = f"it is of tier {key.tier!r}, but the configuration has {', '.join(self._tiers)}"
            elif key.tokens_per_month is not None and not self._has_usage_log:
                skipped[key_id] = "it has tokens_per_month, which needs a usage log: name telemetry.usage_log (--usage-log)"
            else:
                keys[key_id] = key
        for key_id, problem in skipped.items():
            log.error("%s: the entry %s is skipped: %s", self._path, key_id, problem)
        return KeyFile(keys, skipped)

    def _version(self) -> _Version:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def check_key_file(path: Path, tiers: Mapping[str, TierConfig], *, has_usage_log: bool = False) -> None:
    """Raise ConfigError if the file of API keys can't be read, or if one of its entries would be skipped."""
    for key_id, problem in Keyring(path, tiers, has_usage_log=has_usage_log).state().skipped.items():
        raise ConfigError(f"{path}: keys.{key_id}: {problem}", param="http.keys_file")

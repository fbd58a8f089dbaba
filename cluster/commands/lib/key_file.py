"""Edits of the file of API keys: one at a time, and each of them wholly or not at all.

lock `<file>.lock` ─► read ─► change ─► write beside it, fsync ─► note in the audit log ─► rename over it ─► unlock

A symbolic link stands for its file, so that all names of a file share one lock, and a key is revoked under all of them.

A new file is for its owner alone (mode 0600). An edit keeps the mode, and owner and group where it may: who could read the keys
before, such as a container's user, reads a revocation, too.

Routers see the old file or the new one, never half of one, and read the new one with their next request. Entries that can't be
read are kept as they are, so one of them hinders no edit of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from protocol.errors import ConfigError
from router.access.keys import ApiKey, new_entry, new_secret, read_entries, render_entries

Note = Callable[[str], None]
"""Is told of a key's id when its change is about to take effect. If it raises, nothing changes."""


def _unnoted(key_id: str) -> None:
    """The note where nobody keeps one."""


def add_key(path: Path, values: dict[str, Any], note: Note = _unnoted) -> str:
    """Add a key with these `values` of ApiKey; makes the file if there is none. Returns the key, which is kept nowhere.

    Raises ConfigError.
    """
    given, key_id, salt, digest = new_secret()
    try:
        key = ApiKey(salt=salt, digest=digest, created=datetime.now(UTC), **values)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise ConfigError(f"{name}: {first['msg']}, not {first['input']!r:.40}", param=name) from None
    with _edited(path, partial(note, key_id), may_be_new=True) as entries:
        entries[key_id] = new_entry(key)
    return given


def revoke_key(path: Path, key_id: str, note: Note = _unnoted) -> None:
    """Refuse a key from now on. Raises ConfigError if there is none of this id, or if it was revoked before."""
    with _edited(path, partial(note, key_id), may_be_new=False) as entries:
        if key_id not in entries:
            raise ConfigError(f"{path} has no key {key_id!r:.100}; `tandem keys list` shows them", param="id")
        entry = entries[key_id]
        if not isinstance(entry, dict):
            raise ConfigError(f"the entry {key_id} is wrong, and refused as it is: take it out of {path} by hand", param="id")
        if entry.get("revoked") is not None:
            raise ConfigError(f"the key {key_id} was revoked before", param="id")
        entries[key_id] = {**entry, "revoked": datetime.now(UTC).isoformat()}


@contextmanager
def _edited(path: Path, note: Callable[[], None], *, may_be_new: bool) -> Iterator[dict[str, JsonValue]]:
    """The file's entries by key id, to be changed inside; noted and written back unless something is raised."""
    path = Path(os.path.realpath(path))  # of a link it is the file that is locked and replaced
    try:
        if not (may_be_new and not path.exists()):
            read_entries(path)  # what is no file of keys is refused before a lock is made beside it
        with open(f"{path}.lock", "w", opener=_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for a few milliseconds by whoever edits
            entries = {} if may_be_new and not path.exists() else read_entries(path)
            yield entries
            _replace(path, render_entries(entries), note)
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}", param="http.keys_file") from None


def _replace(path: Path, data: bytes, note: Callable[[], None]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # readable by its owner alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            _keep_rights(path, descriptor)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        note()
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _keep_rights(path: Path, descriptor: int) -> None:
    """Give an open file the mode of the one at `path`, if there is one, and its owner and group as far as that is permitted."""
    try:
        former = path.stat()
    except FileNotFoundError:
        return
    mode = former.st_mode & 0o777
    for owner in (former.st_uid, -1):  # only root may give a file to another user, but its owner to a group of his
        with contextlib.suppress(OSError):
            os.fchown(descriptor, owner, former.st_gid)
            break
    else:
        mode &= ~0o070  # they were another group's
    os.fchmod(descriptor, mode)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
